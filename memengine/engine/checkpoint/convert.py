"""From a sharded checkpoint to one file, and back: ``memengine convert SOURCE TARGET``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from memengine.engine.checkpoint.checksums import PLACEHOLDER_DIGITS, SAFETENSORS_KEY, seal, verify
from memengine.engine.checkpoint.files import CheckpointError, atomic_write, read_pickle
from memengine.engine.checkpoint.saving import save_errors, write_file
from memengine.engine.checkpoint.sharded import SUFFIX, is_sharded, read_sharded
from memengine.engine.checkpoint.sharded_saving import sharded_write
from memengine.engine.checkpoint.state import key_by_index
from memengine.engine.checkpoint.weights import read_file

_METADATA = ('epoch', 'iter', 'seed', 'cfg', 'experiment_name', 'time', 'samples_per_step')
_WEIGHTS = ('state_dict', 'meta')
_FORMATS = f'.safetensors (weights only), {SUFFIX} (sharded) or .pth (as MMEngine writes it)'


def convert(source: str | Path, target: str | Path) -> str:
    """Write a checkpoint in another form, whole or not at all; file names say which forms.

    ``.dcp`` and ``.pth`` hold all of a run, so training goes on from either. ``.safetensors``
    holds the weights by name, as other programs read them, and where they are from.

    Raises:
        CheckpointError: When the source cannot be read or the target not be written.

    Cost: host memory for the whole checkpoint (for its weights only, towards safetensors).
    """
    source, target = Path(source), Path(target)
    if target.suffix not in ('.safetensors', '.pth', SUFFIX):
        raise CheckpointError(f'TARGET: {target} must end in {_FORMATS}')
    if target.exists():
        raise CheckpointError(f'TARGET: there is {target} already')
    if not source.exists():
        raise CheckpointError(f'SOURCE: there is no checkpoint {source}')
    weights_only = target.suffix == '.safetensors'
    verify(source)
    checkpoint = _read(source, weights_only)
    target.parent.mkdir(parents=True, exist_ok=True)
    if weights_only:
        _write_safetensors(checkpoint, target)
    elif target.suffix == SUFFIX:
        sharded_write(target, checkpoint)()
    else:
        if 'optimizer' in checkpoint:
            checkpoint['optimizer'] = key_by_index(checkpoint['optimizer'])
        write_file(target, checkpoint)
    what = f'{len(checkpoint["state_dict"])} tensor(s) of weights'
    if 'optimizer' in checkpoint and not weights_only:
        what += ', and the optimiser'
    return f'{source} -> {target}: {what}'


def export_weights(source: Path, target: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the weights of a checkpoint of this run's to a ``.safetensors`` file, as one rank.

    Args:
        source: A checkpoint that is whole.
        target: Is replaced.
        group: A process group of this rank alone, if there are several.

    Raises:
        SaveError: When it cannot be written.

    Cost: host memory for the weights, of a sharded checkpoint; of a file they are mapped.
    """
    if is_sharded(source):
        checkpoint = read_sharded(source, entries=_WEIGHTS.__contains__, group=group)
    else:
        checkpoint = read_pickle(source, mapped=True)
    _write_safetensors(checkpoint, target)


def _read(source: Path, weights_only: bool) -> dict[str, Any]:
    if is_sharded(source):
        return read_sharded(source, entries=lambda name: not weights_only or name in _WEIGHTS)
    return read_file(str(source))


def _write_safetensors(checkpoint: dict[str, Any], target: Path) -> None:
    state = checkpoint['state_dict']
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise CheckpointError(f'safetensors holds tensors only, and {", ".join(other)} is none')
    meta = checkpoint.get('meta', {})
    noted = {key: str(meta[key]) for key in _METADATA if meta.get(key) is not None}
    held: set[int] = set()
    tensors = {}
    for name, tensor in state.items():  # safetensors wants no two tensors to share memory
        shared = tensor.untyped_storage().data_ptr() in held
        held.add(tensor.untyped_storage().data_ptr())
        tensors[name] = (tensor.clone() if shared else tensor).contiguous()
    with save_errors(target), atomic_write(target) as partial:
        save_file(tensors, partial, metadata={**noted, SAFETENSORS_KEY: PLACEHOLDER_DIGITS})
        seal(partial)
