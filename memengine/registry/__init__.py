"""Registries of memengine: children of MMEngine's with the scope ``memengine``.

A config names a class (``type='DINO'``) and the registry imports the modules
under ``locations`` only when it first has to find one. What is not found here
is looked for in MMEngine, so every MMEngine type keeps its name.
"""

from typing import Annotated, Any

from mmengine import registry as _root
from mmengine.registry import Registry

__all__ = [
    'DATASETS',
    'DATA_SAMPLERS',
    'EVALUATOR',
    'FUNCTIONS',
    'HOOKS',
    'LOG_PROCESSORS',
    'LOOPS',
    'METRICS',
    'MODELS',
    'MODEL_WRAPPERS',
    'OPTIMIZERS',
    'OPTIM_WRAPPERS',
    'OPTIM_WRAPPER_CONSTRUCTORS',
    'PARAM_SCHEDULERS',
    'RUNNERS',
    'TRANSFORMS',
    'VISBACKENDS',
    'VISUALIZERS',
    'DatasetConfig',
    'HeadConfig',
    'ModelConfig',
    'PreprocessorConfig',
    'TransformConfig',
]


def _child(name: str, parent: Registry, *locations: str) -> Registry:
    return Registry(name, parent=parent, scope='memengine', locations=list(locations))


RUNNERS = _child('runner', _root.RUNNERS, 'memengine.engine.runner')
LOOPS = _child(
    'loop', _root.LOOPS, 'memengine.engine.runner', 'memengine.evaluation.after_training'
)
HOOKS = _child('hook', _root.HOOKS, 'memengine.engine.hooks')
OPTIMIZERS = _child('optimizer', _root.OPTIMIZERS, 'memengine.engine.optim')
OPTIM_WRAPPERS = _child('optim_wrapper', _root.OPTIM_WRAPPERS, 'memengine.engine.optim')
OPTIM_WRAPPER_CONSTRUCTORS = _child(
    'optimizer wrapper constructor', _root.OPTIM_WRAPPER_CONSTRUCTORS, 'memengine.engine.optim'
)
PARAM_SCHEDULERS = _child('parameter scheduler', _root.PARAM_SCHEDULERS, 'memengine.engine.optim')
MODEL_WRAPPERS = _child('model_wrapper', _root.MODEL_WRAPPERS, 'memengine.engine.wrappers')
LOG_PROCESSORS = _child('log_processor', _root.LOG_PROCESSORS)
MODELS = _child('model', _root.MODELS, 'memengine.models', 'memengine.datasets')
DATASETS = _child('dataset', _root.DATASETS, 'memengine.datasets')
DATA_SAMPLERS = _child('data sampler', _root.DATA_SAMPLERS, 'memengine.datasets')
TRANSFORMS = _child('transform', _root.TRANSFORMS, 'memengine.datasets.transforms')
FUNCTIONS = _child('function', _root.FUNCTIONS, 'memengine.datasets')
METRICS = _child('metric', _root.METRICS, 'memengine.evaluation')
EVALUATOR = _child('evaluator', _root.EVALUATOR, 'memengine.evaluation')
VISUALIZERS = _child('visualizer', _root.VISUALIZERS, 'memengine.visualization')
VISBACKENDS = _child('vis_backend', _root.VISBACKENDS, 'memengine.visualization')

# Arguments that a constructor builds from a registry, dict(type='...', ...), or are built. With
# the type that is meant when none is said, or the settings that the constructor adds.
ModelConfig = Annotated[dict[str, Any], MODELS]
HeadConfig = Annotated[dict[str, Any], MODELS, ('in_dim',)]
PreprocessorConfig = Annotated[dict[str, Any], MODELS, 'BaseDataPreprocessor']
DatasetConfig = Annotated[dict[str, Any], DATASETS]
TransformConfig = Annotated[dict[str, Any], TRANSFORMS]
