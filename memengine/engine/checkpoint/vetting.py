"""What torch's safe unpickler let pass before torch 2.10, though it can write over memory.

There, items of anything were set, not of dicts only, and a storage could be said to be larger than
it is. The same pickle is read here first, into inert records.

Source: https://github.com/pytorch/pytorch/security/advisories/GHSA-63cw-57p8-fm3p (CVE-2026-24747)
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Mapping
from typing import IO, Any

# Of torch's storages, whose own word for it is deprecated.
_ITEM_BYTES = {
    **dict.fromkeys(('Untyped', 'Bool', 'Byte', 'Char', 'QInt8', 'QUInt8', 'QUInt4x2'), 1),
    **dict(QUInt2x4=1, Half=2, BFloat16=2, Short=2, Float=4, Int=4, QInt32=4),
    **dict(Double=8, Long=8, ComplexFloat=8, ComplexDouble=16),
}
_MOST_ITEM_BYTES = 16  # what is taken for those of any other
_LEGACY_PICKLES = 4  # magic number, protocol, system, and then what was saved


def vet(file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Read the pickle in a file of torch's without making anything that it names.

    Raises:
        pickle.UnpicklingError: When it would set items of anything but a dict, take a storage to be
            larger than it is, or memory for what it has not.

    Cost: reads the pickle twice more, of a file that is open already also the tensors.
    """
    if isinstance(file, (str, os.PathLike)):
        with open(file, 'rb') as opened:
            _vet(opened)
    else:  # torch's views of a part of a file cannot do all that zipfile asks of them
        start = file.tell()
        whole = io.BytesIO(file.read())
        file.seek(start)
        _vet(whole)


def _vet(file: IO[bytes]) -> None:
    try:
        if zipfile.is_zipfile(file):
            _vet_archive(file)
        else:
            file.seek(0)
            for _ in range(_LEGACY_PICKLES):
                _load(file, None)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # of any kind: the bytes may say anything
        raise pickle.UnpicklingError(f'damaged or malicious ({error!r})') from error


def _vet_archive(file: IO[bytes]) -> None:
    with zipfile.ZipFile(file) as archive:
        sizes = {each.filename: each.file_size for each in archive.infolist()}
        for name in [name for name in sizes if name.endswith('data.pkl')]:
            folder = name.removesuffix('data.pkl') + 'data/'
            held = {
                path.removeprefix(folder): size
                for path, size in sizes.items()
                if path.startswith(folder)
            }
            _load(io.BytesIO(archive.read(name)), held)


def check_memo(file: IO[bytes]) -> None:
    """Refuse a pickle that remembers something by a number larger than there can be.

    Python's unpickler takes memory for all numbers up to it: one damaged byte could take 32 GiB.
    """
    start = file.tell()
    for count, (opcode, number, _) in enumerate(pickletools.genops(file)):
        if opcode.name.endswith('PUT') and number not in range(count + 1):
            raise pickle.UnpicklingError(f'damaged: it remembers a thing by number {number}')
    file.seek(start)


def _load(file: IO[bytes], held: Mapping[str, int] | None) -> None:
    check_memo(file)
    _Unpickler(file, held).load()


class _Inert:
    """Stands for whatever a pickle names: it can be called and filled, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Dict(dict[Any, Any], _Inert):
    """Stands for the dicts among them, whose items may be set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _List(list[Any], _Inert):
    """Stands for what is filled as a list is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


_CONTAINERS = {'OrderedDict': _Dict, 'Counter': _Dict, 'defaultdict': _Dict, 'deque': _List}


class _Unpickler(pickle.Unpickler):
    """Args: the pickle, and the bytes of each storage in the archive; None where none are known."""

    def __init__(self, file: IO[bytes], held: Mapping[str, int] | None) -> None:
        super().__init__(file, encoding='latin1')
        self._held = held

    def find_class(self, module: str, name: str) -> Any:
        base = _CONTAINERS.get(name, _Inert) if module == 'collections' else _Inert
        return type(name, (base,), {})

    def persistent_load(self, pid: Any) -> _Inert:
        """Look at a storage that is named: (``'storage'``, its type, key, place, length)."""
        if self._held is not None:
            _, kind, key, _, length = pid
            item_bytes = _ITEM_BYTES.get(kind.__name__.removesuffix('Storage'), _MOST_ITEM_BYTES)
            if not 0 <= length * item_bytes <= self._held.get(str(key), 0):
                raise pickle.UnpicklingError(f'damaged: storage {key} is not of {length} values')
        return _Inert()
