"""``memengine embed``: features of images into files, in shards that are resumed.

Shapes: n samples of a shard, D width of the features.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from memengine.evaluation.after_training.predictions import dataset_of, loader_config, predictions
from memengine.registry import LOOPS
from memengine.suggest import import_optional


def _npz(path: Path, columns: dict[str, Tensor]) -> None:
    arrays: dict[str, Any] = {name: value.numpy() for name, value in columns.items()}
    with open(path, 'wb') as file:
        np.savez(file, **arrays)


def _safetensors(path: Path, columns: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in columns.items()}, path)


def _parquet(path: Path, columns: dict[str, Tensor]) -> None:
    import pyarrow
    from pyarrow import parquet

    arrays = {
        name: pyarrow.FixedSizeListArray.from_arrays(value.flatten().numpy(), value.shape[1])
        if value.ndim == 2
        else pyarrow.array(value.numpy())
        for name, value in columns.items()
    }
    parquet.write_table(pyarrow.table(arrays), path)


_WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {
    'npz': _npz,
    'parquet': _parquet,
    'safetensors': _safetensors,
}


@LOOPS.register_module()
class EmbedLoop:
    """Writes the features of the validation data, a file for each ``shard_size`` images.

    A shard holds ``feature`` [n, D] and what else the model gives of a sample, and ``label``,
    ``index`` and ``bank`` where the data have them. Beside ``logits`` a label is the number that
    its class had in training, which is theirs, too. A shard is written whole or not at all, so
    that the command goes on where it was broken off; ranks share the shards. ``embed.json`` says
    what the features are of, the weights and the data's settings by their checksums; others are
    refused in the same folder.

    Args:
        runner: With the model, and ``val_dataloader`` in its config.
        format: ``'npz'``, ``'parquet'`` (needs pyarrow) or ``'safetensors'``.
        shard_size: Images in a file.
        dtype: Of the features and whatever else is no whole number: ``'float32'`` or ``'float16'``.

    Raises:
        ImportError: When pyarrow is missing.
        ValueError: For another setting, when the folder holds other features, where a feature is
            NaN or infinite, another output NaN, and where ``dtype`` cannot hold a number.

    Cost: the forward passes, and one shard in memory.
    """

    def __init__(
        self,
        runner: Any,
        format: Literal['npz', 'parquet', 'safetensors'] = 'npz',
        shard_size: int = 10_000,
        dtype: Literal['float32', 'float16'] = 'float32',
    ) -> None:
        if format not in _WRITERS:
            raise ValueError(f'embed.format must be one of {", ".join(_WRITERS)}, got {format!r}')
        if shard_size < 1:
            raise ValueError(f'embed.shard_size must be at least 1, got {shard_size}')
        if format == 'parquet':
            import_optional('pyarrow', "embed.format='parquet' ('npz' needs nothing)")
        self.runner, self.format, self.shard_size = runner, format, shard_size
        self.dtype: torch.dtype = getattr(torch, dtype)

    def run(self) -> str:
        """Write what is not there yet; returns what was written, and where."""
        runner, folder = self.runner, Path(self.runner.work_dir)
        dataset = dataset_of(runner)
        size = len(dataset)
        count = -(-size // self.shard_size)
        self._check_manifest(folder / 'embed.json', size)
        missing = [
            shard
            for shard in range(runner.rank, count, runner.world_size)
            if not self._path(folder, shard).exists()
        ]
        rows = [
            row
            for shard in missing
            for row in range(shard * self.shard_size, min((shard + 1) * self.shard_size, size))
        ]
        held: list[dict[str, Tensor]] = []
        shards = iter(missing)
        self._metainfo = getattr(dataset, 'metainfo', None)
        for batch, outputs in predictions(runner, dataset, rows) if rows else ():
            held.append(self._columns(batch, outputs))
            held = self._write_full(folder, held, shards)
        if held:
            self._write(folder, next(shards), _joined(held))
        return (
            f'{len(rows)} of {size} images in {len(missing)} file(s) of {count}: '
            f'{self._path(folder, 0).with_name(f"features_*.{self.format}")}'
        )

    @cached_property
    def _numbers_in_training(self) -> dict[int, int]:
        """Of the data's labels, by the names of their classes; empty where these are the same."""
        trained_meta = self.runner.message_hub.runtime_info.get('dataset_meta')
        own, trained = (
            list((meta or {}).get('classes') or ()) for meta in (self._metainfo, trained_meta)
        )
        if not own or not trained or own == trained:
            return {}
        if lacking := [name for name in own if name not in trained]:
            self.runner.logger.warning(
                f'embed: training has no class {lacking[0]!r} (of {len(lacking)} such); labels are '
                "the validation data's own numbers, not the places of classes in logits"
            )
            return {}
        return {number: trained.index(name) for number, name in enumerate(own)}

    def _check_manifest(self, path: Path, size: int) -> None:
        manifest = dict(
            checkpoint=os.path.abspath(self.runner.cfg.load_from),
            weights=_checksum_of_weights(self.runner.model),
            data=_checksum_of_config(loader_config(self.runner)['dataset']),
            images=size,
            format=self.format,
            shard_size=self.shard_size,
            dtype=str(self.dtype).removeprefix('torch.'),
        )
        if path.exists():
            if (there := json.loads(path.read_text())) != manifest:
                differing = ', '.join(
                    name for name in manifest if there.get(name) != manifest[name]
                )
                raise ValueError(
                    f'{path.parent} holds features of other {differing}: remove them, or choose '
                    'another folder with --work-dir'
                )
        elif self.runner.rank == 0:
            partial = path.with_name(f'.{path.name}.partial')  # other ranks may be about to read it
            partial.write_text(json.dumps(manifest, indent=2) + '\n')
            partial.replace(path)

    def _path(self, folder: Path, shard: int) -> Path:
        return folder / f'features_{shard:05}.{self.format}'

    def _columns(self, batch: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        samples = batch['data_samples']
        known = {
            name: torch.as_tensor(samples[name])
            for name in ('label', 'index', 'bank')
            if name in samples
        }
        if 'logits' in outputs and 'label' in known:
            numbers = self._numbers_in_training
            known['label'] = known['label'].clone().apply_(lambda it: numbers.get(it, it))
        columns = {name: self._column(name, value) for name, value in outputs.items()}
        return {**columns, **known}

    def _column(self, name: str, given: Tensor) -> Tensor:
        """[n, D], or [n] of what is one number for each sample."""
        flat = given.flatten(1) if given.ndim > 1 else given
        if not flat.is_floating_point():
            return flat
        column, what = flat.to(self.dtype), 'features' if name == 'feature' else name
        if (column.isinf() & flat.isfinite()).any():
            raise ValueError(
                f"embed.dtype='{str(self.dtype).removeprefix('torch.')}' cannot hold the {what} of "
                "some images: set 'float32'"
            )
        wrong = ~flat.isfinite() if name == 'feature' else flat.isnan()
        if wrong.any():
            raise ValueError(f'the {what} of some images are NaN or infinite')
        return column

    def _write_full(self, folder: Path, held: list[dict[str, Tensor]], shards: Any) -> Any:
        """Write the shards that are full; returns what is left."""
        while sum(len(part['feature']) for part in held) >= self.shard_size:
            joined = _joined(held)
            self._write(folder, next(shards), {n: v[: self.shard_size] for n, v in joined.items()})
            held = [{n: v[self.shard_size :] for n, v in joined.items()}]
        return held if held and len(held[0]['feature']) else []

    def _write(self, folder: Path, shard: int, columns: dict[str, Tensor]) -> None:
        path = self._path(folder, shard)
        partial = path.with_name(f'.{path.name}.partial')
        _WRITERS[self.format](partial, columns)
        partial.replace(path)


def _checksum_of_weights(model: nn.Module) -> str:
    """Of a model that was trained anew, another one, though its file has the same name."""
    value = 0
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            value = zlib.crc32(numbers.numpy().data, value)
    return f'{value:08x}'


def _checksum_of_config(config: Any) -> str:
    text = json.dumps(config, default=lambda it: type(it).__name__)
    return f'{zlib.crc32(text.encode()):08x}'


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
