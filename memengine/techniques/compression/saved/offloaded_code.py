"""Codes beside an offload: their tensors move out, as others do."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import IO

from torch import Tensor

from memengine.techniques.activation_offload import offload_tensor
from memengine.techniques.codecs.codec import Code


class OffloadedCode:
    """A code whose tensors have moved out; pickle takes it apart, and puts it together again."""

    def __init__(self, code: Code) -> None:
        with io.BytesIO() as file:
            pickler = _MovingPickler(file)
            pickler.dump(code)
            self._rest, self._tensors = file.getvalue(), pickler.tensors

    def decode(self) -> Tensor:
        """The tensor, of what is fetched again."""
        with io.BytesIO(self._rest) as file:
            return _FetchingUnpickler(file, self._tensors).load().decode()


class _MovingPickler(pickle.Pickler):
    """Moves tensors out instead of writing them."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.tensors: list[Callable[[], Tensor]] = []

    def persistent_id(self, part: object) -> int | None:
        if not isinstance(part, Tensor):
            return None
        self.tensors.append(offload_tensor(part))
        return len(self.tensors) - 1


class _FetchingUnpickler(pickle.Unpickler):
    """Fetches them again."""

    def __init__(self, file: IO[bytes], tensors: list[Callable[[], Tensor]]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self.tensors[index]()
