"""Sharding in which nothing is on the device ahead of its turn or after it.

``fully_shard`` gathers the next unit while one computes, and keeps the buffer of a gathering
until the next and that of a reduction until the next. That hides the transport, and costs up to
three units more than need be. Here a unit's turn in backward holds, one after the other: the buffer
and the parameters gathered from it, these and their gradients, the gradients and the buffer to
reduce them. It is never more than twice the unit.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from memengine._torch_private.distributed import gather_on_compute_stream
from memengine._torch_private.ops import do_not_compile, pytree


class _FreeingReduceScatter:
    """``fully_shard``'s reduction, whose input can be freed before the next one.

    It asks for an input on the stream that computes, and then for an output on the stream that
    reduces.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._is_output_next = False
        self._computes: Any = None  # streams
        self._reduces: Any = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(*size, dtype=dtype, device=device)
        stream = torch.get_device_module(device).current_stream()
        if self._is_output_next:
            self._reduces = stream
        else:
            self._input, self._computes = weakref.ref(tensor), stream
        self._is_output_next = not self._is_output_next
        return tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)

    def free(self, *unused: Any) -> None:
        """What is allocated from now on may take the input's memory."""
        tensor = None if self._input is None else self._input()
        if tensor is not None and not self._is_output_next:
            self._computes.wait_stream(self._reduces)
            tensor.untyped_storage().resize_(0)
        self._input, self._is_output_next = None, False


def one_unit_at_a_time(model: Any) -> None:
    """Make a model that ``fully_shard`` was applied to gather and reduce without overlap.

    Cost: what computes waits for what is sent. Before torch has ``set_custom_reduce_scatter`` the
    input of a reduction is still kept until the next.
    """
    reduces: Any = _FreeingReduceScatter()

    @do_not_compile
    def free_before_backward(module: nn.Module, args: Any, outputs: Any) -> None:
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(reduces.free)

    sharded: list[Any] = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for module in sharded:
        module.set_modules_to_backward_prefetch([module])  # which is there: nothing else is
        if hasattr(module, 'set_custom_reduce_scatter'):
            module.set_custom_reduce_scatter(reduces)
            # Before fully_shard's own hook, which gathers.
            module.register_forward_hook(free_before_backward, prepend=True)
    gather_on_compute_stream(model)  # the buffer is freed when the unit is gathered
