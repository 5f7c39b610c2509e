"""The list of tensors of a sharded checkpoint, read without running anything.

torch unpickles ``.metadata`` without looking what is in it. Here its pickle may name torch's own
records only, and even they are not made: each becomes an inert record, from which torch's are
built once it is known what they hold.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from memengine._torch_private.distributed import METADATA_RECORDS
from memengine.engine.checkpoint.files import CheckpointError, DamagedError
from memengine.engine.checkpoint.vetting import check_memo


class SafeReader(dcp.FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint by its list of tensors, vetted once.

    The tensors themselves are read by torch, with its safe unpickler.

    Raises:
        CheckpointError: When the list is damaged, names anything but tensors, or files that are
            not whole in the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tensors, self._locations = _read(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The vetted list; torch would read the file, or another one, once more."""
        return Metadata({**self.tensors}, storage_data=self._locations)


@dataclass(frozen=True)
class _ChunkLocation:
    """Where a chunk lies; what torch's reader asks of it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Record:
    """Stands for a record of torch's while the pickle is read: what it was given, no deeds."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # Classes of this reading only: a pickle can set attributes of the classes that it names.
        self.kinds = {name: type(name[1], (_Record,), {}) for name in METADATA_RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        """A torch dtype, or what stands for one of torch's records."""
        if (module, name) in self.kinds:
            return self.kinds[module, name]
        found = getattr(torch, name, None) if module == 'torch' else None
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"wants to run '{module}.{name}', which no list of tensors needs")
        return found


def _read(
    folder: Path,
) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, _ChunkLocation]]:
    try:
        with open(folder / '.metadata', 'rb') as file:
            check_memo(file)
            root = _Unpickler(file).load()
        listed = {
            name: _tensor(entry)
            for name, entry in _state(root, 'Metadata')['state_dict_metadata'].items()
        }
        locations = dict(_locations(root.state['storage_data'], folder))
        for name, tensor in listed.items():
            _check_chunks(name, tensor, locations)
    except CheckpointError as error:
        raise type(error)(f'{folder}/.metadata {error}') from error
    except Exception as error:  # of any kind: the bytes may say anything
        raise DamagedError(f'{folder}/.metadata is damaged: {error!r}') from error
    return listed, locations


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise CheckpointError(f'holds a {type(record).__name__} where a {kind} belongs')
    return record.state


def _size(record: Any) -> torch.Size:
    size = torch.Size(record.args[0])
    if any(length < 0 for length in size):
        raise CheckpointError(f'holds a shape of {tuple(size)}')
    return size


def _tensor(record: Any) -> TensorStorageMetadata:
    entry = _state(record, 'TensorStorageMetadata')  # others are pickles, which torch would run
    dtype = _state(entry['properties'], 'TensorProperties')[0]
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f'holds the dtype {dtype!r}')
    chunks = [_state(chunk, 'ChunkStorageMetadata') for chunk in entry['chunks']]
    return TensorStorageMetadata(
        TensorProperties(dtype),
        _size(entry['size']),
        [ChunkStorageMetadata(_size(c['offsets']), _size(c['sizes'])) for c in chunks],
    )


def _locations(
    storage_data: dict[Any, Any], folder: Path
) -> Iterator[tuple[MetadataIndex, _ChunkLocation]]:
    lengths: dict[str, int] = {}
    for index, info in storage_data.items():
        entry, at = _state(info, '_StorageInfo'), _state(index, 'MetadataIndex')
        name = entry['relative_path']
        if name not in lengths:
            file = folder / name
            if file.name != name or not file.is_file():
                raise DamagedError(
                    f'names {name!r}, which the folder has not: damaged or incomplete'
                )
            lengths[name] = file.stat().st_size
        start, length = entry['offset'], entry['length']
        if entry.get('transform_descriptors') or not 0 <= start <= start + length <= lengths[name]:
            raise DamagedError(f'does not fit {name}, which is damaged or incomplete')
        offset = None if at.get('offset') is None else _size(at['offset'])
        yield MetadataIndex(at['fqn'], offset, at.get('index')), _ChunkLocation(name, start, length)


def _check_chunks(
    name: str, tensor: TensorStorageMetadata, locations: dict[MetadataIndex, _ChunkLocation]
) -> None:
    """Refuse a tensor of which parts are not there, before memory is taken for all of it."""
    itemsize = tensor.properties.dtype.itemsize
    there = 0
    for chunk in tensor.chunks:
        place = locations.get(MetadataIndex(name, chunk.offsets))
        if place is None or chunk.sizes.numel() * itemsize > place.length:
            raise DamagedError(f'has no place for a part of {name}')
        there += chunk.sizes.numel()
    if there != tensor.size.numel():
        raise DamagedError(f'lists {there} of the {tensor.size.numel()} values of {name}')
