"""memengine: a training engine in which memory is a config option.

The public names below are imported when they are first used, so that ``import memengine`` costs
next to nothing, and the plain-torch ones never import MMEngine.
"""

from importlib import import_module
from typing import Any

__version__ = '0.1.0'

_HOME = {
    'AccumulationOptimWrapper': 'engine.optim',
    'ClipLoss': 'losses',
    'ConLoss': 'losses',
    'DINOLoss': 'losses',
    'Gather': 'losses',
    'GradCache': 'techniques',
    'GradCacheOptimWrapper': 'engine.optim',
    'KoLeoLoss': 'losses',
    'NTXentLoss': 'losses',
    'Runner': 'engine',
    'SavedBytes': 'memory',
    'SigLipLoss': 'losses',
    'SupConLoss': 'losses',
    'apply_techniques': 'techniques',
    'checkpoint_activations': 'techniques',
    'compile_blocks': 'techniques',
    'drop_activations': 'techniques',
    'efficient_conv_bn_eval': 'techniques',
    'koleo_loss': 'losses',
    'offload_activations': 'techniques',
    'quantize_activations': 'techniques',
    'recompute_activations': 'techniques',
    'run_step': 'engine',
    'to_dropit': 'techniques',
    'undo_dropit': 'techniques',
}

__all__ = ['__version__', *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memengine' has no attribute '{name}'")
    return getattr(import_module(f'memengine.{_HOME[name]}'), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
