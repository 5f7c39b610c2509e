"""What oneDNN keeps for each new shape of an operator: the kernels that it makes for it.

Forward and backward on batches of sizes that were not there before (of attention, numbers of
tokens), in one thread: how much the process's own memory has grown afterwards, as the kernel counts
it. Products, attention and convolutions in bfloat16 depend on what the processor has for it:
``ONEDNN_MAX_CPU_ISA=AVX512_CORE`` shows one without. Nothing is timed.

    python tools/benchmarks/library_kernels.py
"""

from __future__ import annotations

import gc
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memengine.memory.measuring import map_blocks_singly

STATUS = Path('/proc/self/status')
SIZES = (8, 16, 12, 20, 24, 28, 10, 14)  # of batches; the first also makes what all share

CONVOLUTIONS: dict[str, tuple[int, nn.Conv2d]] = {  # side of the images
    'stem, 4 × 4, stride 4': (64, nn.Conv2d(1, 40, 4, stride=4)),
    'depthwise, 7 × 7': (16, nn.Conv2d(40, 40, 7, padding=3, groups=40)),
    'depthwise, 3 × 3': (16, nn.Conv2d(64, 64, 3, padding=1, groups=64)),
    'grouped, 3 × 3': (16, nn.Conv2d(64, 64, 3, padding=1, groups=4)),
    'downsampling, 2 × 2': (16, nn.Conv2d(40, 80, 2, stride=2)),
    'whole, 3 × 3': (16, nn.Conv2d(64, 64, 3, padding=1)),
    'whole, 3 × 3, stride 2': (16, nn.Conv2d(64, 64, 3, padding=1, stride=2)),
    'pointwise': (16, nn.Conv2d(64, 256, 1)),
}
Case = tuple[nn.Module, Callable[[int], Tensor]]  # a module, and its input of a size


class Attention(nn.Module):
    """Of tokens to each other."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def cases() -> dict[str, Case]:
    """What is carried out."""
    found: dict[str, Case] = {
        name: (layer, partial(_images, layer.in_channels, side))
        for name, (side, layer) in CONVOLUTIONS.items()
    }
    found['linear'] = nn.Linear(192, 768), lambda size: torch.randn(size, 17, 192)
    found['GELU'] = nn.GELU(), lambda size: torch.randn(size, 17, 192)
    found['attention'] = Attention(), lambda size: torch.randn(4, 3, 64 + size, 64)
    return found


def _images(channels: int, side: int, size: int) -> Tensor:
    return torch.randn(size, channels, side, side)


def _kib_now() -> int:
    """What of this process is in no file."""
    gc.collect()
    return int(re.findall(r'RssAnon:\s*(\d+)', STATUS.read_text())[0])


def kept_kib(
    module: nn.Module, batch_of: Callable[[int], Tensor], dtype: torch.dtype
) -> list[tuple[int, int]]:
    """KiB that are kept after forward, and after backward, for each new size."""

    def carry_out(size: int, backward: bool) -> None:
        result = module(batch_of(size).to(dtype).requires_grad_())
        if backward:
            result.backward(torch.ones_like(result))
        module.zero_grad()

    kept = []
    for size in SIZES:
        before = _kib_now()
        carry_out(size, False)
        after_forward = _kib_now()
        carry_out(size, True)
        kept.append((after_forward - before, _kib_now() - after_forward))
    return kept[1:]


def main() -> None:
    torch.set_num_threads(1)
    map_blocks_singly()
    for dtype in (torch.float32, torch.bfloat16):
        print(dtype)
        for name, (module, batch_of) in cases().items():
            kept = kept_kib(module.to(dtype), batch_of, dtype)
            print(f'{name}: {means(kept)}: ' + ', '.join(f'{f} + {b}' for f, b in kept))


def means(kept: Sequence[tuple[int, int]]) -> str:
    forward, backward = (statistics.mean(some) for some in zip(*kept, strict=True))
    return f'{forward:.0f} KiB in forward and {backward:.0f} in backward'


if __name__ == '__main__':
    main()
