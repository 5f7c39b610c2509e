"""Weights from a file into a model: all or a part of them, and what does not fit is said."""

from __future__ import annotations

import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mmengine.runner.checkpoint import _load_checkpoint
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from memengine.engine.checkpoint.files import CheckpointError, DamagedError, safe_loading
from memengine.engine.checkpoint.latest import checkpoint_of
from memengine.engine.checkpoint.sharded import is_sharded, read_sharded

_SHOWN = 3


def read_file(
    filename: str,
    trusted: Iterable[str] = (),
    map_location: Any = 'cpu',
    entries: Sequence[str] = ('state_dict', 'model'),
) -> dict[str, Any]:
    """Read a checkpoint that is one file, safely, as MMEngine's dict with ``state_dict``.

    Args:
        filename: A path, or a URL as MMEngine takes it; of weights alone, too.
        trusted: See :func:`memengine.engine.checkpoint.files.safe_loading`.
        map_location: Where tensors go.
        entries: Below which of these the weights are: the first that is there; else they are all.

    Raises:
        CheckpointError: When it is damaged, not safe to read, or holds no weights.
        FileNotFoundError: When it is not there, or is no file.
    """
    if filename.endswith('.safetensors'):
        if not os.path.isfile(filename):
            raise FileNotFoundError(f'there is no file {filename}')
        try:
            with safe_open(filename, 'pt') as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return dict(meta=file.metadata() or {}, state_dict=state)
        except SafetensorError as error:
            raise DamagedError(f'{filename} is damaged or incomplete: {error}') from error
    path = os.path.expanduser(filename)
    if _is_program(path):
        raise CheckpointError(
            f"{filename} is a TorchScript program, which is code, as OpenAI's files of CLIP are; "
            "the same weights as data: OpenClipImage(pretrained='openai'), or ask for its "
            'state_dict as a .safetensors file'
        )
    with safe_loading(filename, trusted):
        load = torch.load if os.path.isfile(path) else _load_checkpoint  # of MMEngine, for URLs
        read = load(path, map_location=map_location)
    entry = next((key for key in entries if isinstance(read, dict) and key in read), None)
    state = _flattened(read) if entry is None else read[entry]
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f'{filename} holds no weights by name')
    return {'meta': {}, **(read if entry else {}), 'state_dict': state}


def _is_program(path: str) -> bool:
    if not os.path.isfile(path):  # a pipe would be waited for
        return False
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except OSError:
        raise
    except Exception:  # of any kind: the bytes may say anything, and who reads them says what
        return False
    return any(name.rpartition('/')[2] == 'constants.pkl' for name in names)


def _flattened(read: Any) -> Any:
    """Weights of several networks side by side, as official files of DINO have them, in one dict.

    ``{'teacher': {'backbone.norm.bias': ...}}`` becomes ``{'teacher.backbone.norm.bias': ...}``.
    """
    if not isinstance(read, dict) or any(isinstance(value, Tensor) for value in read.values()):
        return read
    networks = {
        name: value
        for name, value in read.items()
        if isinstance(value, dict) and any(isinstance(entry, Tensor) for entry in value.values())
    }
    flat = {f'{name}.{key}': v for name, state in networks.items() for key, v in state.items()}
    return flat or read


def read_weights(filename: str, entries: Sequence[str] = ('state_dict', 'model')) -> dict[str, Any]:
    """The weights in a file of any form, in a sharded checkpoint or in a run's folder, by name."""
    filename = checkpoint_of(filename)
    if not is_sharded(filename):
        return read_file(filename, entries=entries)['state_dict']
    return read_sharded(Path(filename), entries='state_dict'.__eq__)['state_dict']


def load_from_options(load_from: str | Mapping[str, Any]) -> dict[str, Any]:
    """``load_from`` as arguments of ``Runner.load_checkpoint``: strict unless it says otherwise."""
    if not isinstance(load_from, Mapping):
        return dict(filename=str(load_from), strict=True)
    options = {'strict': True, **load_from}
    return {'filename': str(options.pop('path')), **options}


def select(
    state: Mapping[str, Any], revise_keys: Sequence[tuple[str, str]], part: str, into: str
) -> OrderedDict[str, Any]:
    """The weights below ``part``, by the names that they have below ``into``."""
    chosen: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        for pattern, replacement in revise_keys:
            name = re.sub(pattern, replacement, name)
        if not part or name.startswith(f'{part}.'):
            chosen[_join(into, name[len(part) + 1 :] if part else name)] = value
    if hasattr(state, '_metadata') and not (part or into):
        chosen._metadata = state._metadata  # type: ignore[attr-defined]
    return chosen


def _join(*parts: str) -> str:
    return '.'.join(filter(None, parts))


def load_weights(
    model: nn.Module, state: Mapping[str, Any], source: str, into: str = '', strict: bool = True
) -> str | None:
    """Load weights by name into a model, or into the module ``into`` of it.

    Args:
        model: The model, not wrapped.
        state: Weights by the model's names, as :func:`select` gives them.
        source: Where they are from, for messages.
        into: The module that has to be in ``state`` whole.
        strict: Whether all of it must be there, in its shape, and nothing else.

    Returns:
        What does not fit, in short, if that was allowed.

    Raises:
        CheckpointError: When something does not fit; without ``strict`` when nothing does. The
            model may have got what fits by then.
    """
    held = model.state_dict()
    fitting = OrderedDict(
        (name, value)
        for name, value in state.items()
        if name not in held or getattr(value, 'shape', None) == getattr(held[name], 'shape', None)
    )
    if hasattr(state, '_metadata'):
        fitting._metadata = state._metadata  # type: ignore[attr-defined]
    reshaped = [
        f'{name} {_shape(state[name])} for {_shape(held[name])}'
        for name in state
        if name not in fitting
    ]
    result = model.load_state_dict(fitting, strict=False)
    missing = [
        name
        for name in result.missing_keys
        if name not in state
        and (not into or name.startswith(f'{into}.'))
        and not name.endswith('num_batches_tracked')  # old files have none
    ]
    found = [
        f'{len(names)} {what} ({", ".join(names[:_SHOWN])}{", ..." if names[_SHOWN:] else ""})'
        for names, what in (
            (missing, 'missing'),
            (reshaped, 'of another shape'),
            (result.unexpected_keys, 'that the model does not have'),
        )
        if names
    ]
    loaded = len(fitting) - len(result.unexpected_keys)
    if loaded and not (strict and found):
        return f'{loaded} weights fit, {", ".join(found)}' if found else None
    what = f'only {loaded} weights fit' if loaded else 'no weight fits'
    raise CheckpointError(f'{source}: {what} {into or "the model"}: {", ".join(found)}')


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def parts_that_fit(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Modules of a file below which every name is found that a module of a model has."""
    there = set(names)
    needed = [name for name in wanted if not name.endswith('num_batches_tracked')]
    if not needed:
        return []
    ends = (name.removesuffix(needed[0]) for name in names if name.endswith(needed[0]))
    parts = [end.rstrip('.') for end in ends if not end or end.endswith('.')]
    return [part for part in parts if all(_join(part, name) in there for name in needed)]


def _matching_parts(model: nn.Module, names: Iterable[str]) -> tuple[list[str], str]:
    """Parts of a file that hold the module that most of a model is; that module."""
    names, held = list(names), list(model.state_dict())
    for into in ('', *(name for name, _ in model.named_children())):
        wanted = list(select(dict.fromkeys(held), (), into, ''))
        parts = [part for part in parts_that_fit(names, wanted) if part or into]
        if parts and 2 * len(wanted) > len(held):
            return parts, into
    return [], ''


def only_matching_part(model: nn.Module, names: Sequence[str]) -> tuple[str, str] | None:
    """The part of a file that is most of a model, and where it goes, if there is no other way.

    Returns:
        ``part`` and ``into``; None where a name fits as it is, and where no or several parts do.
    """
    if not model.state_dict().keys().isdisjoint(names):
        return None
    parts, into = _matching_parts(model, names)
    return (parts[0], into) if len(parts) == 1 else None


def advise(model: nn.Module, names: Iterable[str], path: str) -> str:
    """Which setting loads the module that most of a model is, if a file holds it whole; else ''."""
    parts, into = _matching_parts(model, names)
    if not parts:
        return ''
    settings = f"path='{path}', part='{parts[-1]}'"
    if into != parts[-1]:
        settings += f", into='{into}'"
    return (
        f'; it holds all of {into or "the model"} as {" and as ".join(parts)}: set '
        f'load_from=dict({settings}) to load that'
    )
