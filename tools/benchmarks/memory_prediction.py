"""Predicted beside measured: the peak of a training step of shipped configs, on a CPU.

Each is measured in a process of its own, with one thread, by ``memengine measure``: the kernel's
high-water mark of the third step. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measuring
import torch

CACHE = ('optim_wrapper.type=GradCacheOptimWrapper', 'optim_wrapper.chunk_size=64')
SLICES = ('optim_wrapper.type=AccumulationOptimWrapper', 'optim_wrapper.micro_batch_size=16')
BFLOAT16 = ('optim_wrapper.precision=bf16',)
LAUNCHER = ['--launcher', 'pytorch']
STEPS: list[tuple[str, tuple[str, ...]]] = [
    ('classify_vit', ()),
    ('classify_vit', BFLOAT16),
    ('clip_vit', ()),
    ('clip_vit', ('optim_wrapper.optimizer.type=AdamWBf16',)),
    ('dino_vit', ()),
    ('dino_vit', SLICES),
    ('dino_vit', BFLOAT16),
    ('dino_vit_photographs', ()),
    ('siglip_vit', ()),
    ('simclr_vit', ()),
    ('simclr_vit', CACHE),
    ('simclr_vit', BFLOAT16),
    ('simclr_vit', ('activation_checkpointing=[blocks]',)),
]


def measure(config: str, options: tuple[str, ...], ranks: int = 1) -> dict[str, Any]:
    """Bytes of the peak of one config's step, predicted and measured; of several ranks of one."""
    started = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(ranks)]
    command = [sys.executable, *(started if ranks > 1 else []), '-m', 'memengine', 'measure']
    command += [f'configs/{config}.py', '--json', *(LAUNCHER if ranks > 1 else [])]
    command += ['--cfg-options', *options] if options else []
    done = subprocess.run(
        command,
        cwd=measuring.ROOT,
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    return {'config': config, 'options': list(options)} | {
        key: figures[key] for key in ('predicted_bytes', 'peak_bytes')
    }


def error(row: Mapping[str, Any]) -> float:
    """How far a prediction is from what was measured, as a share of it."""
    return row['predicted_bytes'] / row['peak_bytes'] - 1


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [['config', 'options', 'predicted, MiB', 'measured, MiB', 'error']]
    for row in results['rows']:
        mib = [f'{row[key] / 2**20:.1f}' for key in ('predicted_bytes', 'peak_bytes')]
        options = ' '.join(f'`{option}`' for option in row['options']) or '–'
        cells.append([f'`{row["config"]}`', options, *mib, f'{error(row):+.1%}'])
    sizes = [abs(error(row)) for row in results['rows']]
    summary = f'Median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}.'
    text = f'{measuring.table(cells)}\n\n{summary}\n\n{measuring.origin(results)}'
    return {'memory_prediction': text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--quick', action='store_true', help='the first config only')
    args = parser.parse_args()
    rows = [measure(*step) for step in (STEPS[:1] if args.quick else STEPS)]
    results = {'run': measuring.where(torch.device('cpu')), 'rows': rows}
    measuring.publish(results, 'memory_prediction', tables, args.out, args.page)


if __name__ == '__main__':
    main()
