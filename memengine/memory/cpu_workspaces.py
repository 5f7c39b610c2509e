"""What an operator makes and costs; what kernels of the CPU, and the allocator, take beside it.

Measured by the kernel's high-water mark on x86, with AMX, AVX-512 and AVX2 (torch 2.15, one
thread and two): oneDNN convolutions reorder images, gradients and weights into blocks of channels,
and kernels are made for each shape; MKL's products of matrices pack panels of their factors into
buffers that it keeps for good; gloo copies what ranks gather and scatter. Other operators
(attention, norms, losses) take nothing that counts beside their results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memengine._torch_private.attention import CPU_ATTENTION_BACKWARD
from memengine._torch_private.autograd import storage_key
from memengine._torch_private.fake_operators import Results
from memengine._torch_private.ops import (
    FLOPS_OF,
    OpOverload,
    cpu_multiplies_bfloat16,
    written_arguments,
)

MOST_COMPUTED_BYTES = 4096
"""Of a result whose numbers are computed, if those of the inputs are known."""

_LEAST_OF_LIBRARIES = 2**19
_SHARE_OF_LIBRARIES = 0.01

# Which oneDNN makes for each new shape, and keeps (up to 1024): means of
# tools/benchmarks/library_kernels.py, of convolutions in backward those of each kind.
_FORWARD_KERNELS = 36 * 2**10
_POINTWISE_KERNELS, _STRIDED_KERNELS = 90 * 2**10, 240 * 2**10
_FIRST_FORWARD_KERNELS, _FIRST_POINTWISE_KERNELS = 74 * 2**10, 55 * 2**10
_OTHER_KERNELS = 110 * 2**10
_GELU_KERNELS, _GELU_BACKWARD_KERNELS = 26 * 2**10, 34 * 2**10
_LSTM_KERNELS = 4600 * 2**10  # of both ways, from five measured steps
# In bfloat16, where the processor multiplies it.
_HALF_FORWARD_KERNELS, _HALF_BACKWARD_KERNELS = 130 * 2**10, 290 * 2**10
_HALF_DEPTHWISE_KERNELS = 80 * 2**10
_HALF_SUM_KERNELS, _HALF_PRODUCT_KERNELS = 690 * 2**10, 780 * 2**10
_HALF_ATTENTION_KERNELS = 2**21  # for whole blocks of tokens, and for the rest
_ATTENTION_BLOCK = 32

_MOST_SUMMED_BYTES = 2**21  # on their way through gloo
_PAGE = 4096
_SINGLE_BLOCK = 64 * 2**10  # from here on a block is mapped by itself
_FEWEST_CHANNELS = 8  # that are put into blocks
_HAS_WIDE_BLOCKS = 'AVX512' in torch.backends.cpu.get_cpu_capability()
_BLOCK = 16 if _HAS_WIDE_BLOCKS else 8  # channels
# A filter's side from which its gradient is a product, and what oneDNN's kernels for that take.
_LARGE_SIDE, _PRODUCT_KERNELS = (15, 3700 * 2**10) if _HAS_WIDE_BLOCKS else (14, 1700 * 2**10)
_MANY_SEQUENCES = 128  # whose gates oneDNN's LSTM computes step by step
_HAS_BFLOAT16 = cpu_multiplies_bfloat16()
_known_threads: int | None = None

_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
)


class Operator(NamedTuple):
    """What an operator makes and costs, for inputs of certain shapes.

    Attributes:
        name: Of the operator.
        results: From which its results can be made again; None where they do not follow.
        fresh: Which of the tensors in them are new memory.
        written: Whether it writes to an input.
        may_be_small: Whether its results are so small that their numbers are computed.
        flops: As :class:`LiveMemory` counts them.
        moved_bytes: As well.
        workspace_bytes: What it takes while it runs.
        packed_bytes: What MKL keeps for it: needed, and written.
        kernels: What oneDNN keeps for it: by what that is made for, its bytes.
        is_collective: Whether it takes its workspace until all ranks are there.
    """

    name: str
    results: Results | None
    fresh: tuple[int, ...]
    written: bool
    may_be_small: bool
    flops: int
    moved_bytes: int
    workspace_bytes: int
    packed_bytes: tuple[int, int]
    kernels: Mapping[Hashable, int]
    is_collective: bool

    @classmethod
    def of(
        cls, func: OpOverload, args: Any, kwargs: Any, out: Any, inputs: list[Tensor]
    ) -> Operator:
        """What it has made.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: As well, by name.
            out: What it has returned.
            inputs: The tensors among its arguments.
        """
        there = {storage_key(t.untyped_storage()) for t in inputs if t.layout == torch.strided}
        made = tensors_of(out)
        fresh = tuple(
            index
            for index, tensor in enumerate(made)
            if storage_key(tensor.untyped_storage()) not in there
        )
        written = bool(written_arguments(func, args, kwargs))
        flops = FLOPS_OF.get(func.overloadpacket) if fresh or written else None
        return cls(
            str(func),
            Results.of(out, inputs),
            fresh,
            written,
            bool(made) and all(_nbytes(tensor) <= MOST_COMPUTED_BYTES for tensor in made),
            int(flops(*args, **kwargs, out_val=out)) if flops is not None else 0,
            sum(map(_nbytes, [*inputs, *(made[index] for index in fresh)])),
            _workspace_bytes(func, args, out),
            _packed_bytes(func, args),
            _kernels(func, args, kwargs, inputs),
            'c10d' in func.namespace,
        )


def predict_for_threads(number: int) -> None:
    """Predict for so many, where the process itself has one, as a copy of it has."""
    global _known_threads
    _known_threads = number


@functools.cache  # to be read when it is asked for first: it is long where there are many cores
def _has_deep_panels() -> bool:
    """Whether MKL multiplies with AVX-512; it has processors of others do without."""
    info = Path('/proc/cpuinfo')
    return _HAS_WIDE_BLOCKS and info.is_file() and 'GenuineIntel' in info.read_text()


def _threads() -> int:
    return _known_threads or torch.get_num_threads()


def with_lstm_workspace(func: OpOverload, args: Sequence[Any], out: Any) -> Any:
    """A fake operator's results, where a layer of an LSTM keeps what oneDNN's backward reads.

    Torch's fake operator gives an empty tensor in its place, the real one a larger one than is
    written to: of an input [T, B, I] and H units forward writes gates and cells.
    """
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not args[-1]:  # as in inference
        return out
    (steps, rows, _), units = args[0].shape, args[10]
    written = steps * rows * (_in_lines(4 * units) + units)
    return *out[:3], out[3].new_empty(written * args[0].element_size())


def _lstm(image: Tensor, weights: Sequence[Tensor], units: int) -> int:
    """Weights in blocks, and the gates of all steps at once where sequences are few."""
    steps, rows, _ = image.shape
    at_once = steps * rows * 4 * units * image.element_size() if rows < _MANY_SEQUENCES else 0
    return sum(map(_nbytes, weights)) + at_once


def _lstm_backward(
    image: Tensor, weights: Sequence[Tensor], gradient: Tensor | None, units: int
) -> int:
    """Gradients of gates; those of states, in parts of what is kept that nothing has written to."""
    steps, rows, width = image.shape
    of_states = (steps + 1) * rows * (3 * _in_lines(max(width, units)) + units)
    of_gates = steps * rows * 4 * units
    copied = 0 if gradient is None or gradient.is_contiguous() else _nbytes(gradient)
    numbers = (of_states + of_gates) * image.element_size()
    return numbers + sum(map(_nbytes, weights)) + copied


def _in_lines(numbers: int) -> int:
    """Numbers of a row of float32 with what fills it up, and sets rows apart in the cache."""
    whole = math.ceil(numbers / 16) * 16
    return whole if whole % 256 else whole + 16


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = [*tree.values()]
    several = tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for one in several for tensor in tensors_of(one)]


def mapped_bytes(nbytes: int) -> int:
    """What a block takes of the system: whole pages, and the allocator's own line before it."""
    if nbytes < _SINGLE_BLOCK:
        return nbytes
    return math.ceil((nbytes + 128) / _PAGE) * _PAGE


def _workspace_bytes(func: Any, args: Sequence[Any], out: Any) -> int:
    """Bytes that an operator takes while it runs, beside its inputs and results."""
    aten = torch.ops.aten
    if func is aten.convolution.default:
        image, weight, _, stride, *_, groups = args
        if _is_unpacked(image, weight, max(stride), groups):
            return 0
        return _convolution(image, weight, out, max(stride), groups)
    if func is aten.convolution_backward.default:
        gradient, image, weight, _, stride, _, dilation, *_, groups, wanted = args
        if _is_unpacked(image, weight, max(stride), groups):
            return 0
        if _is_product_of_dilated(image, weight, max(stride), dilation, groups):
            return _dilated_backward(gradient, image, weight, groups)
        return _convolution_backward(gradient, image, weight, max(stride), groups, wanted[0])
    if func is aten.mkldnn_rnn_layer_backward.default:
        return _lstm_backward(args[0], args[1:5], gradient=args[10], units=args[15])
    if func is aten.mkldnn_rnn_layer.default:
        return _lstm(args[0], args[1:5], units=args[10])
    return _collective(func, args, out) if 'c10d' in func.namespace else 0


def _kernels(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
) -> dict[Hashable, int]:
    """Bytes of the kernels that oneDNN makes for an operator, those of attention for any batch."""
    name, aten = str(func), torch.ops.aten
    first = -2 if func is CPU_ATTENTION_BACKWARD else None
    case = name, *((tensor.shape[first:], tensor.dtype) for tensor in inputs)
    if func not in (aten.convolution.default, aten.convolution_backward.default):
        return _some(case, _other_kernels(func, args, kwargs))
    is_backward = func is aten.convolution_backward.default
    image, weight, _, stride, padding, dilation, *_, groups = args[1:-1] if is_backward else args
    if _is_unpacked(image, weight, max(stride), groups):
        return {}
    if is_backward:
        is_dilated = _is_product_of_dilated(image, weight, max(stride), dilation, groups)
        is_packed = _is_product(weight, groups) or (is_dilated and _is_packed(weight))
    else:
        is_packed = _is_product_in_forward(image, weight, padding)
    if is_packed:
        return {'a convolution as a product': _PRODUCT_KERNELS}
    of_layer = name, weight.shape, weight.dtype, max(stride), image.shape[2:]
    of_batch, more = _convolution_kernels(weight, max(stride), groups, is_backward)
    return {**_some(of_layer, more), case: of_batch}


def _some(kernel: Hashable, nbytes: int) -> dict[Hashable, int]:
    return {kernel: nbytes} if nbytes else {}


def _other_kernels(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    aten = torch.ops.aten
    if func in (aten.gelu.default, aten.gelu_backward.default):
        is_exact = kwargs.get('approximate', 'none') == 'none'  # the other way is torch's own
        kernels = _GELU_KERNELS if func is aten.gelu.default else _GELU_BACKWARD_KERNELS
        return kernels if is_exact else 0
    if func is aten.mkldnn_rnn_layer_backward.default:
        return _LSTM_KERNELS
    if func in _PRODUCTS and _is_native_half(args[-1]):
        return _HALF_SUM_KERNELS if func is aten.addmm.default else _HALF_PRODUCT_KERNELS
    if func is CPU_ATTENTION_BACKWARD and _is_native_half(args[1]):
        whole, rest = divmod(args[1].shape[-2], _ATTENTION_BLOCK)
        return _HALF_ATTENTION_KERNELS * (2 if whole and rest else 1)
    return 0


def _convolution_kernels(
    weight: Tensor, stride: int, groups: int, is_backward: bool
) -> tuple[int, int]:
    """What is made for each batch, and how much more for a layer's first."""
    if _is_native_half(weight):
        if groups > 1:
            return _HALF_DEPTHWISE_KERNELS, 0
        return _HALF_BACKWARD_KERNELS if is_backward else _HALF_FORWARD_KERNELS, 0
    if not is_backward:
        return _FORWARD_KERNELS, _FIRST_FORWARD_KERNELS
    if stride > 1 and groups == 1:
        return _STRIDED_KERNELS, 0
    if _is_pointwise(weight, stride):
        return _POINTWISE_KERNELS, _FIRST_POINTWISE_KERNELS
    return _OTHER_KERNELS, 0


def _is_unpacked(image: Tensor, weight: Tensor, stride: int, groups: int) -> bool:
    """Whether a convolution is a product as it stands, with one thread, and not oneDNN's."""
    is_few = image.shape[0] < 16 and weight.dtype == torch.float32 and groups == 1
    return is_few and _threads() == 1 and _is_pointwise(weight, stride)


def _is_product(weight: Tensor, groups: int) -> bool:
    """Whether a large filter's gradient, as a patch embedding's, is a product of packed factors.

    So it is beyond the sides that kernels of convolutions are made for, where there are more
    channels than are multiplied unpacked, or rows lie badly.
    """
    if groups > 1 or weight.dtype != torch.float32 or max(weight.shape[2:]) < _LARGE_SIDE:
        return False
    return not _HAS_WIDE_BLOCKS or weight.shape[0] > 192 or weight[0].numel() % 1024 == 0


def _is_product_of_dilated(
    image: Tensor, weight: Tensor, stride: int, dilation: Sequence[int], groups: int
) -> bool:
    """Whether a dilated filter's gradient is a product, too.

    So it is where the filter is larger than the image (in a ResNet without its last strides on
    small images, DeepLab's widest), where it has strides or goes by single channels, and without
    AVX-512.
    """
    if weight.dtype != torch.float32 or max(dilation) == 1:
        return False
    is_depthwise = weight.shape[1] == 1 < groups
    if not _HAS_WIDE_BLOCKS or stride > 1 or is_depthwise:
        return True
    sides = zip(weight.shape[2:], dilation, image.shape[2:], strict=True)
    return any((side - 1) * apart + 1 > whole for side, apart, whole in sides)


def _is_packed(weight: Tensor) -> bool:
    """Whether the product that gives a dilated filter's gradient packs its factors."""
    return not _HAS_WIDE_BLOCKS or weight.shape[0] >= 192


def _is_product_in_forward(image: Tensor, weight: Tensor, padding: Sequence[int]) -> bool:
    """Whether a convolution is a product of packed factors in forward, too.

    So it is where more is filled up at a side than kernels of convolutions compute at once.
    """
    sides = zip(padding, image.shape[2:], strict=True)
    return weight.dtype == torch.float32 and any(more > min(whole, 16) for more, whole in sides)


def _packed_bytes(func: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Bytes of the buffer that MKL packs a product's factors into, and how many it writes to.

    It keeps one for each product that needs a larger one than any before, and so more where slices
    are of two shapes: a smaller one comes first, or its sums over rows are cut into longer ones.
    Each thread packs into its own.
    Fitted to MKL's own account (2024.2), exactly for products of some size: on AMD, and on Intel,
    where with AVX-512 panels are deeper, of few rows only these are packed, and of few columns
    nothing.
    """
    if func not in _PRODUCTS:
        return 0, 0
    left, right = args[-2:]
    if left.dtype != torch.float32 or not left.numel() or not torch.backends.mkl.is_available():
        return 0, 0
    rows, summed, columns = min(left.shape[-2], 384), left.shape[-1], right.shape[-1]
    if _has_deep_panels():
        if columns < 192:
            return 0, 0
        packed = rows if left.shape[-2] <= rows else rows + min(columns, 9984)
        depth = min(summed, 384)
        return 2**22 + (rows + columns) * depth * 4, packed * depth * 4 * _threads()
    columns = min(columns, 6400)
    depth = max(summed, 128) if summed <= 192 else min(math.ceil(summed / 2), 192)
    return (2 * rows + columns) * depth * 4 + 17024, (rows + columns) * depth * 4 * _threads()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_native_half(tensor: Tensor) -> bool:
    return _HAS_BFLOAT16 and tensor.dtype == torch.bfloat16


def _in_blocks(image: Tensor) -> int:
    """Of an image [B, C, ...] in blocks of channels, the last one filled up."""
    channels = image.shape[1]
    return _nbytes(image) // max(channels, 1) * math.ceil(channels / _BLOCK) * _BLOCK


def _read_in_blocks(image: Tensor) -> int:
    """Of what is read: few channels are left as they are."""
    return _in_blocks(image) if image.shape[1] >= _FEWEST_CHANNELS else 0


def _is_pointwise(weight: Tensor, stride: int) -> bool:
    return stride == 1 and all(side == 1 for side in weight.shape[2:])


def _is_channels_last(image: Tensor) -> bool:
    last = image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)
    return last and not image.is_contiguous()


def _convolution(image: Tensor, weight: Tensor, out: Tensor, stride: int, groups: int) -> int:
    w = _nbytes(weight) if groups == 1 else 0
    if _is_channels_last(image):
        return w if _is_pointwise(weight, stride) else 2 * w
    x, y = _read_in_blocks(image), _in_blocks(out)  # of which y comes out of its blocks without x
    is_depthwise = weight.shape[1] == 1 < groups
    twice = _is_native_half(image) and not is_depthwise
    return max(x + w + y - _nbytes(out), 2 * y if twice else y)


def _convolution_backward(
    gradient: Tensor, image: Tensor, weight: Tensor, stride: int, groups: int, of_image: bool
) -> int:
    is_half = _is_native_half(image)
    x = _read_in_blocks(image) or (_nbytes(image) if is_half else 0)
    y, w = _in_blocks(gradient), _nbytes(weight)
    sums = 2 * w if is_half else 0  # in float32
    if _is_channels_last(image):
        if _is_pointwise(weight, stride):
            return 2 * w
        reordered = 0 if _is_channels_last(gradient) else _nbytes(gradient)
        return reordered + (3 * w if groups == 1 else _by_blocks_of_channels(weight, image))
    copied = 0 if gradient.is_contiguous() else _nbytes(gradient)
    strided = 2 * _nbytes(image) if of_image and stride > 1 else 0
    if groups == 1 or max(weight.shape[2:]) <= 3:
        return copied + max(x + y + sums, max(x, y) + w, strided if groups == 1 else 0)
    if not of_image:
        return copied
    return copied + max(x + y - _nbytes(image), x, strided if is_half else 0)


def _dilated_backward(gradient: Tensor, image: Tensor, weight: Tensor, groups: int) -> int:
    """In each thread what the filter sees of an image's channels, each place written out."""
    seen = weight[0].numel() * gradient[0, 0].numel() * image.element_size()
    at_once = seen * min(_threads(), image.shape[0] * groups)
    of_image = max(_in_blocks(image), _in_blocks(gradient)) + _nbytes(weight)
    copied = 0 if gradient.is_contiguous() else _nbytes(gradient)
    return copied + max(at_once, of_image)


def _by_blocks_of_channels(weight: Tensor, image: Tensor) -> int:
    """A weight of groups [C, C / groups, h, w] as if 16 by 16 channels met; not for 3 by 3."""
    if not _HAS_WIDE_BLOCKS or max(weight.shape[2:]) <= 3:
        return 0
    if _is_native_half(weight):  # and once more in float32
        return 3 * 256 * _nbytes(weight) + _nbytes(image) // 2
    return 256 * _nbytes(weight)


def _collective(func: OpOverload, args: Sequence[Any], out: Any) -> int:
    """What gloo copies: all that is gathered or scattered, and of sums what is on its way."""
    name = func.overloadpacket.__name__
    if 'gather' in name:
        return max(sum(map(_nbytes, tensors_of(tree))) for tree in (args[0], out))
    if 'reduce' not in name:
        return 0
    nbytes = max(map(_nbytes, tensors_of(args)))
    return ('scatter' in name) * nbytes + min(nbytes // 2, _MOST_SUMMED_BYTES)


def library_bytes(tensors_bytes: int) -> int:
    """What else is taken where tensors take so much at their peak, as measured.

    It is blocks too small for a page of their own, Python's objects of the graph, the kernel's
    tables.
    """
    return _LEAST_OF_LIBRARIES + int(_SHARE_OF_LIBRARIES * tensors_bytes)
