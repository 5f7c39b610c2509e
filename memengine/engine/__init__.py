"""Adapters between MMEngine and the techniques: runner, loops, step, wrappers, hooks.

What is named here is imported when it is used, so that the command line can answer before that.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    'EpochBasedTrainLoop': 'runner',
    'IterBasedTrainLoop': 'runner',
    'Progress': 'step',
    'Runner': 'runner',
    'run_step': 'step',
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'memengine.engine' has no attribute '{name}'")
    return getattr(import_module(f'memengine.engine.{_MODULES[name]}'), name)
