"""What may stand where in a config: the table of schemas.

:data:`TOP_SCHEMAS` lists those that MMEngine's Runner knows, :data:`PARAMETER_SCHEMAS` those that
go by the name of an argument, wherever it is. Classes are never listed here: registries know them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from mmengine.optim import BaseOptimWrapper
from mmengine.runner import Runner
from mmengine.utils.dl_utils import set_multi_processing
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

from memengine.engine.config.schema.bounds import NON_NEGATIVE_NUMBER, Constraint, of_hint
from memengine.engine.config.schema.bounds_of_settings import (
    BOUNDS_AT,
    DEFAULT_HOOK_TYPES,
    MULTIPLIERS,
    RULES_AT,
    TOP_BOUNDS,
)
from memengine.engine.config.schema.schema import Config, Schema, SchemaChoice
from memengine.engine.config.schema.types import arguments_of

__all__ = [
    'PARAMETER_SCHEMAS',
    'TOP_CONSTRAINTS',
    'TOP_KEYS',
    'TOP_SCHEMAS',
    'KEYS_SET_TOGETHER',
]

FREE = Schema()
MODEL = Schema('MODELS', complete=True)
PART = Schema('MODELS')
DATASET = Schema('DATASETS', complete=True)
SAMPLER = Schema('DATA_SAMPLERS', supplied=('dataset', 'seed'), complete=True)
TRANSFORM = Schema('TRANSFORMS', complete=True)
HOOK = Schema('HOOKS', builder_keys=('priority',), complete=True)
METRIC = Schema('METRICS', complete=True)
INITIALIZER = Schema(
    'WEIGHT_INITIALIZERS',
    children={'override': Schema('WEIGHT_INITIALIZERS', builder_keys=('name',))},
)
VIS_BACKEND = Schema('VISBACKENDS', supplied=('save_dir',), complete=True)
FUNCTION = Schema('FUNCTIONS', positional=1, required=('type',))
OPTIMIZER = Schema(
    'OPTIMIZERS',
    positional=1,
    complete=True,
    constraints=BOUNDS_AT['optim_wrapper.optimizer'],
)


SCHEDULER = Schema(
    'PARAM_SCHEDULERS',
    builder_keys=('convert_to_iter_based',),
    supplied=('optimizer', 'epoch_length'),
    complete=True,
    constraints=BOUNDS_AT['param_scheduler'],
    rule=RULES_AT['param_scheduler'],
)
VISUALIZER = Schema(
    'VISUALIZERS', supplied=('name', 'save_dir'), children={'vis_backends': VIS_BACKEND}
)


LOADER = Schema(
    accepts=DataLoader,
    builder_keys=('num_batch_per_epoch', 'disable_subprocess_warning'),
    required=('dataset', 'sampler'),
    children={
        'dataset': DATASET,
        'sampler': SAMPLER,
        'batch_sampler': Schema('DATA_SAMPLERS', supplied=('sampler', 'batch_size')),
        'collate_fn': FUNCTION,
        'worker_init_fn': FUNCTION,
    },
    constraints=BOUNDS_AT['train_dataloader'],
    rule=RULES_AT['train_dataloader'],
)

_TRAIN_LOOP = Schema(
    'LOOPS',
    supplied=('runner', 'dataloader'),
    complete=True,
    constraints=BOUNDS_AT['train_cfg'],
)
_EVAL_LOOP = Schema(
    'LOOPS', supplied=('runner', 'dataloader', 'evaluator'), constraints=BOUNDS_AT['val_cfg']
)


def _train_loop(config: Config) -> Schema:
    if 'type' in config:
        return _TRAIN_LOOP
    by_epoch = config.get('by_epoch', 'max_iters' not in config)
    default = 'EpochBasedTrainLoop' if by_epoch else 'IterBasedTrainLoop'
    return replace(_TRAIN_LOOP, default=default, builder_keys=('by_epoch',))


def _clip_grad(config: Config) -> Schema:
    by_value = config.get('type') == 'value'
    return Schema(
        accepts=clip_grad_value_ if by_value else clip_grad_norm_,
        positional=1,
        builder_keys=('type',),
        complete=True,
        constraints=BOUNDS_AT['optim_wrapper.clip_grad'],
    )


_PARAMWISE = Schema(
    accepts=('custom_keys', 'bypass_duplicate', *MULTIPLIERS),
    children={
        # Beside these two, a parameter group may have any setting of the user's own.
        'custom_keys': Schema(
            entry=Schema(
                accepts=('lr_mult', 'decay_mult'),
                lenient=True,
                constraints=dict.fromkeys(('lr_mult', 'decay_mult'), NON_NEGATIVE_NUMBER),
            )
        )
    },
    constraints=BOUNDS_AT['optim_wrapper.paramwise_cfg'],
)
_OPTIM_WRAPPER = Schema(
    'OPTIM_WRAPPERS',
    default='OptimWrapper',
    builder_keys=('constructor', 'paramwise_cfg'),
    required=('optimizer',),
    children={
        'optimizer': OPTIMIZER,
        'clip_grad': _clip_grad,
        'paramwise_cfg': _PARAMWISE,
        'constructor': Schema('OPTIM_WRAPPER_CONSTRUCTORS', bare_type=True),
    },
    constraints=BOUNDS_AT['optim_wrapper'],
)


def _optim_wrapper(config: Config) -> Schema:
    if any(isinstance(value, BaseOptimWrapper) for value in config.values()):
        return FREE  # several, built already, by free names
    constructor = config.get('constructor', 'DefaultOptimWrapperConstructor')
    name = getattr(constructor, '__name__', constructor)
    if str(name).rpartition('.')[2] == 'DefaultOptimWrapperConstructor':
        return _OPTIM_WRAPPER
    # A constructor of the user's own may take keys of its own, and build several wrappers.
    own = {**_OPTIM_WRAPPER.children, 'paramwise_cfg': FREE}
    if 'optimizer' in config:
        return replace(_OPTIM_WRAPPER, lenient=True, children=own)
    return Schema(
        entry=_OPTIM_WRAPPER, children={key: own[key] for key in ('constructor', 'paramwise_cfg')}
    )


def _schedulers(config: Any) -> Schema:
    several = isinstance(config, Mapping) and 'type' not in config
    return Schema(entry=SCHEDULER) if several else SCHEDULER


def _evaluator(config: Any) -> Schema:
    if isinstance(config, Mapping) and 'metrics' in config:
        return Schema('EVALUATOR', default='Evaluator', complete=True, children={'metrics': METRIC})
    return METRIC


_DEFAULT_HOOKS = Schema(
    entry=HOOK,
    children={name: replace(HOOK, default=hook) for name, hook in DEFAULT_HOOK_TYPES.items()},
)

_ENVIRONMENT = Schema(
    accepts=('cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit'),
    children={
        'mp_cfg': Schema(
            accepts=set_multi_processing,
            supplied=('distributed',),
            constraints=BOUNDS_AT['env_cfg.mp_cfg'],
        ),
        'dist_cfg': Schema(
            accepts=torch.distributed.init_process_group,
            builder_keys=('port', 'init_backend'),
            constraints=BOUNDS_AT['env_cfg.dist_cfg'],
        ),
    },
    constraints=BOUNDS_AT['env_cfg'],
)


def _unless_off(schema: Schema) -> SchemaChoice:
    """For a key that may also be switched on or off."""
    return lambda value: schema if value else FREE


# The loops of commands that are run after training, by command, which is their key in a config.
AFTER_TRAINING: Mapping[str, str] = {
    'probe': 'ProbeLoop',
    'embed': 'EmbedLoop',
    'zeroshot': 'ZeroShotLoop',
    'retrieve': 'RetrieveLoop',
    'look': 'LookLoop',
    'export': 'ExportLoop',
}

TOP_SCHEMAS: Mapping[str, SchemaChoice] = {
    'model': MODEL,
    'data_preprocessor': PART,
    'train_dataloader': LOADER,
    'val_dataloader': LOADER,
    'test_dataloader': LOADER,
    'train_cfg': _train_loop,
    'val_cfg': replace(_EVAL_LOOP, default='ValLoop'),
    'test_cfg': replace(_EVAL_LOOP, default='TestLoop'),
    'optim_wrapper': _optim_wrapper,
    'param_scheduler': _schedulers,
    'auto_scale_lr': Schema(
        accepts=('base_batch_size', 'enable'),
        constraints=BOUNDS_AT['auto_scale_lr'],
    ),
    'val_evaluator': _evaluator,
    'test_evaluator': _evaluator,
    'default_hooks': _DEFAULT_HOOKS,
    'custom_hooks': HOOK,
    'env_cfg': _ENVIRONMENT,
    'randomness': Schema(
        accepts=Runner.set_randomness,
        supplied=('self',),
        constraints=BOUNDS_AT['randomness'],
    ),
    'log_processor': Schema('LOG_PROCESSORS', default='LogProcessor', complete=True),
    'visualizer': VISUALIZER,
    'model_wrapper_cfg': Schema(
        'MODEL_WRAPPERS',
        default='MMDistributedDataParallel',
        supplied=('module', 'device_ids'),
    ),
    'compile': _unless_off(Schema(accepts=torch.compile, supplied=('model',))),
    'verify_exactness': _unless_off(
        Schema(
            accepts=('every', 'samples', 'tolerance'),
            constraints=BOUNDS_AT['verify_exactness'],
        )
    ),
    'custom_imports': Schema(accepts=('imports', 'allow_failed_imports')),
    'runner_type': Schema('RUNNERS', bare_type=True),
    'tta_model': Schema('MODELS', supplied=('module',)),
    'tta_pipeline': TRANSFORM,
    **{
        command: Schema('LOOPS', default=loop, supplied=('runner',))
        for command, loop in AFTER_TRAINING.items()
    },
}

TOP_CONSTRAINTS: Mapping[str, Constraint] = {
    **{
        key: of_hint(hint, strict=True)
        for key, hint in arguments_of(Runner).hints.items()
        if key not in TOP_SCHEMAS
    },
    **TOP_BOUNDS,
}

# What a run reads from its config beside the keys of techniques: the Runner's arguments, and more.
TOP_KEYS = frozenset(inspect.signature(Runner.__init__).parameters) - {'self', 'cfg'} | {
    *TOP_SCHEMAS,
    *TOP_CONSTRAINTS,
    'trusted_globals',
    '_scope_',
}
KEYS_SET_TOGETHER = (
    ('train_dataloader', 'train_cfg', 'optim_wrapper'),
    ('val_dataloader', 'val_cfg', 'val_evaluator'),
    ('test_dataloader', 'test_cfg', 'test_evaluator'),
)

# Arguments that mean the same wherever they are found below a type.
PARAMETER_SCHEMAS: Mapping[str, Schema] = {
    'init_cfg': INITIALIZER,
    'data_preprocessor': PART,
    'pipeline': replace(TRANSFORM, complete=False),
    'transforms': replace(TRANSFORM, complete=False),
    'dataset': replace(DATASET, complete=False),
    'datasets': replace(DATASET, complete=False),
    'metrics': replace(METRIC, complete=False),
    'vis_backends': VIS_BACKEND,
    # MMCV's builder of normalisation layers takes this key out.
    'norm_cfg': replace(PART, builder_keys=('requires_grad',), inferred=True, lenient=True),
}
