"""What a checkpoint's pickle may name besides tensors and plain containers: classes of data."""

from __future__ import annotations

import abc
import argparse
import collections
import datetime
import decimal
import enum
import fractions
import importlib
import pathlib
import pickle
import sys
import types
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
from mmengine.logging import HistoryBuffer

_LIBRARY = frozenset(
    (
        argparse.Namespace,
        types.SimpleNamespace,
        collections.OrderedDict,
        collections.defaultdict,
        collections.deque,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        fractions.Fraction,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.WindowsPath,
        uuid.UUID,
    )
)
"""Classes of Python's library that may be trusted."""

_RUNS_AT_READING = (
    '__new__',
    '__init__',
    '__post_init__',
    '__setstate__',
    '__setattr__',
    '__getattr__',
    '__getattribute__',
    '__del__',
)


def is_data(thing: Any) -> bool:
    """Whether it is a class whose objects hold data, so that making one runs no code of its own.

    These are enums, named tuples, dataclasses and plain classes, as long as they define none of
    the methods that run when an object is made, filled or thrown away; NumPy's scalars; and a few
    of Python's library (namespaces, collections, dates, numbers, paths).
    """
    if not isinstance(thing, type):
        return False
    if thing in _LIBRARY or issubclass(thing, (enum.Enum, np.generic)):
        return True
    if type(thing) not in (type, abc.ABCMeta):
        return False
    return all(
        base in (object, tuple) or not any(map(_is_written, _methods(base)))
        for base in thing.__mro__
    ) and (thing not in (object, tuple))


def _methods(cls: type) -> list[Any]:
    return [vars(cls)[name] for name in _RUNS_AT_READING if name in vars(cls)]


def _is_written(method: Any) -> bool:
    """Whether somebody wrote it, rather than ``dataclass`` or ``NamedTuple``."""
    function = getattr(method, '__func__', method)
    code = getattr(function, '__code__', None)
    return not (code and (code.co_filename == '<string>' or function.__module__ == 'dataclasses'))


def is_known_data(dotted: str) -> bool:
    """Whether a name is that of a class of data; what is not imported yet stays so."""
    module, _, name = dotted.rpartition('.')
    return is_data(getattr(sys.modules.get(module), name, None))


def safe_globals(trusted: Iterable[str]) -> list[Any]:
    """What torch's safe unpickler may use, for checkpoints of MMEngine's and what is trusted.

    Raises:
        ValueError: For a trusted name that there is not, or that is no class of data.
    """
    return [*_of_mmengine(), argparse.Namespace, *map(_import_data, trusted)]


def _import_data(dotted: str) -> Any:
    module, _, name = dotted.rpartition('.')
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"trusted_globals: there is no '{dotted}' to trust ({error})") from error
    if not is_data(found):
        raise ValueError(
            f"trusted_globals: '{dotted}' is no class that only holds data, so a file could run "
            'code by it; enums, named tuples, dataclasses and classes without methods of '
            'construction can be trusted'
        )
    return found


def _log_buffer_method(owner: Any, name: str) -> Any:
    """Stands in for ``getattr``, by which MMEngine's log buffers pickle their statistics."""
    if owner is not HistoryBuffer or name not in HistoryBuffer._statistics_methods:
        raise pickle.UnpicklingError(f'GLOBAL getattr: of {owner!r}, {name!r}')
    return getattr(HistoryBuffer, name)


def _of_mmengine() -> list[Any]:
    HistoryBuffer()  # fills in the names of its statistics
    dtypes = {type(np.dtype(code)) for code in np.typecodes['All']}
    # Modules are named otherwise in NumPy 1 than in NumPy 2.
    reconstruct: Any = np.array(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    moved = [  # the names under which the other major version of NumPy pickles the same two
        (function, f'numpy.{core}.multiarray.{function.__name__}')
        for function in (reconstruct, scalar)
        for core in ('core', '_core')
    ]
    methods = (_log_buffer_method, 'builtins.getattr')
    return [HistoryBuffer, methods, np.ndarray, np.dtype, *dtypes, reconstruct, scalar, *moved]
