"""What oneDNN keeps for each new shape of a convolution: the kernels that it makes for it.

Forward and backward of convolutions on batches of sizes that were not there before, in one thread:
how much the process's own memory has grown afterwards, as the kernel counts it. Nothing is timed.
"""

from __future__ import annotations

import gc
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from memengine.memory.measuring import map_blocks_singly

KIB = 1024
STATUS = Path('/proc/self/status')

SIZES = (8, 16, 12, 20, 24, 28, 10, 14)  # of batches; the first also makes what all share
CASES: dict[str, tuple[int, Callable[[], nn.Module]]] = {  # side of the images
    'stem, 4 × 4, stride 4': (64, lambda: nn.Conv2d(1, 40, 4, stride=4)),
    'depthwise, 7 × 7': (16, lambda: nn.Conv2d(40, 40, 7, padding=3, groups=40)),
    'depthwise, 3 × 3': (16, lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64)),
    'grouped, 3 × 3': (16, lambda: nn.Conv2d(64, 64, 3, padding=1, groups=4)),
    'downsampling, 2 × 2': (16, lambda: nn.Conv2d(40, 80, 2, stride=2)),
    'whole, 3 × 3': (16, lambda: nn.Conv2d(64, 64, 3, padding=1)),
    'whole, 3 × 3, stride 2': (16, lambda: nn.Conv2d(64, 64, 3, padding=1, stride=2)),
    'pointwise': (16, lambda: nn.Conv2d(64, 256, 1)),
}


def _kib_now() -> int:
    """What of this process is in no file."""
    gc.collect()
    return int(re.findall(r'RssAnon:\s*(\d+)', STATUS.read_text())[0])


def kept_kib(layer: nn.Conv2d, side: int) -> list[tuple[int, int]]:
    """KiB that are kept after forward, and after backward, for each new size of a batch."""

    def carry_out(size: int, backward: bool) -> None:
        shape = size, layer.in_channels, side, side
        result = layer(torch.randn(shape, requires_grad=True))
        if backward:
            result.backward(torch.ones_like(result))
        layer.zero_grad()

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
    every = []
    for name, (side, make) in CASES.items():
        kept = kept_kib(make(), side)
        every += kept
        print(f'{name}: {means(kept)}: ' + ', '.join(f'{f} + {b}' for f, b in kept))
    print(f'all: {means(every)}')


def means(kept: Sequence[tuple[int, int]]) -> str:
    forward, backward = (statistics.mean(some) for some in zip(*kept, strict=True))
    return f'{forward:.0f} KiB in forward and {backward:.0f} in backward'


if __name__ == '__main__':
    main()
