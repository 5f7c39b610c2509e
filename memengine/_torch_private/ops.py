"""What torch keeps private of its operators: classes, schemas, prices, modes that see them."""

from __future__ import annotations

import functools
import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as do_not_compile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
)
from torch.utils.flop_counter import flop_registry

__all__ = [
    'CHECKPOINT_HEEDS_HOOKS',
    'FLOPS_OF',
    'HAS_FUSED_RMS_NORM',
    'MODES_OF_SELECTIVE_CHECKPOINTS',
    'OpOverload',
    'OpOverloadPacket',
    'OperatorMode',
    'TorchDispatchMode',
    'argument_names',
    'compiled_checkpoints_write_twice',
    'cpu_multiplies_bfloat16',
    'do_not_compile',
    'draw_from_known_generators_when_compiled',
    'foreach_copy_',
    'foreach_lerp_',
    'foreach_mul_',
    'foreach_norm',
    'fused_rms_norm',
    'is_traceable_wrapper_subclass',
    'last_kept',
    'parts_of_sparse',
    'pytree',
    'written_arguments',
]


class OperatorMode(TorchDispatchMode):
    """A mode that sees every operator, without a wrapper around it that keeps dynamo out.

    The wrapper takes a microsecond or two at each; dynamo leaves frames alone where a mode is on.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


OpOverload = torch._ops.OpOverload
"""An operator in one form: ``torch.ops.aten.mm.default``. Public by its instances only."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""An operator in all of its forms: ``torch.ops.aten.mm``."""

cpu_multiplies_bfloat16 = torch.cpu._is_avx512_bf16_supported
"""Whether the processor has instructions for it. Later versions tell by ``get_capabilities``."""

foreach_norm = torch._foreach_norm
"""Norms of many tensors in few kernels."""

foreach_mul_ = torch._foreach_mul_
"""Many products in few kernels, in place."""

foreach_copy_ = torch._foreach_copy_
"""Many copies in few kernels, into tensors that are there."""

foreach_lerp_ = torch._foreach_lerp_
"""Many moving averages in few kernels, in place."""

CHECKPOINT_HEEDS_HOOKS = 'respect_saved_tensors_hooks' in inspect.signature(checkpoint).parameters
"""Whether what selective checkpointing keeps may pass through the saved-tensor hooks around it, a
meter's or those of offloading; not in 2.6, where it is kept past them."""

MODES_OF_SELECTIVE_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""What selective checkpointing sees the calls by, of a first forward and of a repeated one."""


# `do_not_compile` is `torch.compiler.disable`, but imports dynamo, which takes nearly as long as
# torch itself, only when what it decorates is called.


def compiled_checkpoints_write_twice() -> bool:
    """Whether compiled code writes into buffers again where it repeats a checkpointed forward.

    So it does in 2.6, where AOTAutograd does not know what must be in the forward graph only:
    BatchNorm would count its statistics twice. To be asked where code is compiled: it is a long
    import otherwise, and dynamo takes the answer for a constant.
    """
    from torch._functorch import partitioners

    return not hasattr(partitioners, '_must_be_in_forward')


@functools.cache
def draw_from_known_generators_when_compiled() -> None:
    """Let compiled code with a checkpointed part draw from the device's own generator.

    Since 2.7 such a part draws, on CUDA, from generators that AOTAutograd makes and seeds once,
    when the code first runs: no seed that is set later and no state that is put back reaches them,
    so that a repeated forward has other masks. The form before that is what torch falls back to.
    """
    from torch._functorch import config

    if hasattr(config, 'graphsafe_rng_functionalization'):
        config.graphsafe_rng_functionalization = False


def argument_names(op: OpOverload) -> list[str]:
    """Names of an operator's arguments, in order."""
    return [argument.name for argument in op._schema.arguments]


def written_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What of its arguments the operator writes into."""
    if op.namespace == 'c10d':  # whose schemas do not say it: collectives write into their first
        return list(args[:1]) if op._schema.name.endswith('_') else []
    if not op._schema.is_mutable:
        return []
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def last_kept(mode: Any, op: OpOverload) -> Any:
    """What selective checkpointing in torch 2.6 has kept of an operator's latest call."""
    kept = mode.storage.get(op) if mode is not None else None
    return pytree.tree_map(lambda each: each.val, kept[-1]) if kept else None


HAS_FUSED_RMS_NORM = hasattr(torch.ops.aten, '_fused_rms_norm') and 'normalized_shape' in (
    argument_names(torch.ops.aten._fused_rms_norm.default)
)
"""Whether RMSNorm is one operator; 2.6 has none, and that of 2.8 is another one, for MPS only."""


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm as GPUs run it, and make ``FusedRmsNormBackward``, if torch has it."""
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]


def parts_of_sparse(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse one consists of, in their memory; none of a dense one.

    The public names of a COO tensor's want it to be coalesced.
    """
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products of matrices, of which a causal mask saves nothing, as torch counts elsewhere."""
    *batch, targets, width = query.shape  # [B, H, targets, width]
    pairs = torch.Size(batch).numel() * targets * key.shape[-2]
    return 2 * pairs * (width + value.shape[-1])


def _convolution_backward_flops(
    gradient: Tensor, image: Tensor, weight: Tensor, _: Any, *how: Any, out_val: Any
) -> int:
    """Each of its two gradients costs what the convolution does."""
    of_forward = flop_registry[torch.ops.aten.convolution]
    once = int(of_forward(image, weight, None, *how[:-1], out_val=gradient))
    return once * sum(how[-1][:2])  # which of the gradients are wanted


FLOPS_OF: Mapping[OpOverloadPacket, Callable[..., int]] = ChainMap(
    {torch.ops.aten.convolution_backward: _convolution_backward_flops},
    flop_registry,
    {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops},
)
"""What products of matrices, convolutions and attentions cost: ``FLOPS_OF[op](*args, out_val=x)``.

torch's own figures, to which those of attention on CPUs are added, that torch lacks before 2.15.
Those of a convolution's backward are our own: torch's take the weight's gradient as if there were
no groups, for a depthwise one so many times too much as it has channels.
"""
