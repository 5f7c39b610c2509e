"""What every pair of saved-tensor hooks has to do right about a tensor that stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import (
    base_of,
    check_unmodified,
    current_backward,
    dispatch_keys,
    is_functorch_tensor,
    version_of,
)
from memengine._torch_private.fake import is_fake


class KeptAsIs:
    """A saved tensor that is kept whole.

    It is detached, as a saved output would otherwise hold its own graph in a cycle; a parameter
    has none. Autograd leaves the check of its version to the hooks.
    """

    __slots__ = ('__weakref__', '_version', 'content')
    is_exact = is_whole = True  # of what hooks hold of saved tensors, as is the module
    module: nn.Module | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.content = tensor if type(tensor) is nn.Parameter else tensor.detach()
        self._version = version_of(tensor)

    @property
    def is_modified(self) -> bool:
        """Whether the tensor was modified in place since it was saved."""
        return version_of(self.content) != self._version

    def tensor(self) -> Tensor:
        """The tensor."""
        content = self.content
        if version_of(content) != self._version:
            check_unmodified(content, self._version)  # which raises
        return content

    decode = prefetch = tensor  # there is nothing to decode


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its storage, seen through a shape: no subclass, not sparse, not lazy.

    A fake one counts as what it stands for.
    """
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return is_fake(tensor) and _is_strided(tensor)
    keys = dispatch_keys(tensor)
    found = _plain_by_keys.get(keys)
    if found is None:
        found = _plain_by_keys[keys] = _is_strided(tensor)
    return found


_plain_by_keys: dict[int, bool] = {}


def _is_strided(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type != 'meta'
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
        and not is_functorch_tensor(tensor)
    )


def is_part_without_base(tensor: Tensor) -> bool:
    """Whether a tensor has a part of a memory, and is no view of another tensor.

    Parts that ``unsafe_chunk`` has cut, as of an LSTM's gates, count changes each for itself.
    """
    nbytes = tensor.numel() * tensor.element_size()
    return base_of(tensor) is None and nbytes < tensor.untyped_storage().nbytes()


def may_be_unfilled(tensor: Tensor) -> bool:
    """Whether an operation may have saved a tensor that it has yet to fill, as RReLU its noise.

    Such a tensor is fresh: without a graph, no view, and written to by nobody.
    """
    is_constant = not tensor.requires_grad and tensor.is_floating_point()
    return is_constant and base_of(tensor) is None and version_of(tensor) == 0 and is_plain(tensor)


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return current_backward() != -1


def is_parameter(tensor: Tensor) -> bool:
    """Also one that FSDP has put together for this forward, or a view of it."""
    # To ask nn.Parameter whether a tensor is one takes ten times as long.
    if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
        return True
    base = base_of(tensor)
    return base is not None and type(base) is not Tensor and isinstance(base, nn.Parameter)
