"""Bytes on the device in a step of a sharded model, in blocks, by how units are gathered.

Counted on a CPU with a process group that sends nothing, so the number of ranks costs nothing:
all that is allocated while a step runs, with the buffers of gathering and reducing. Gradients are
there from the step before, as host memory holds them with offload. One image of one patch goes
through, so activations are next to nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from torch import nn

from memengine._torch_private.distributed import pretended_ranks
from memengine.memory.allocated import allocated_peak_bytes
from memengine.techniques import shard_model

MODEL = dict(model_name='vit_base_patch16_224', img_size=16, depth=4, num_classes=1000)
QUICK = {**MODEL, 'depth': 3, 'embed_dim': 384, 'num_heads': 6, 'num_classes': 10}
RANKS = (1, 8)
WAYS: dict[str, dict[str, Any]] = {
    'units are blocks': {},
    'the same, `prefetch=False`': dict(prefetch=False),
    '`offload=True`': dict(offload=True),
    '`offload=True, prefetch=True`': dict(offload=True, prefetch=True),
    "`offload=True, units='blocks'`": dict(offload=True, units='blocks'),
}


def peak_bytes(ranks: int, settings: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Most bytes that a step allocates beyond shards and their gradients."""
    with pretended_ranks(ranks):
        torch.manual_seed(0)
        sharded = shard_model(timm.create_model(**model), **settings)

        def step() -> None:
            with sharded.gathered():
                sharded(torch.ones(1, 3, 16, 16)).sum().backward()

        step()
        return allocated_peak_bytes(step)


def _size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [['blocks on the device', *(f'{ranks} rank(s)' for ranks in RANKS)]]
    for way, peaks in results['rows'].items():
        cells.append([way, *(f'{peak / results["block_mib"]:.2f}' for peak in peaks)])
    sizes = (
        f'A block has {results["block_mib"]:.1f} MiB of parameters, and what is in no block '
        f'{results["rest_mib"] / results["block_mib"]:.2f} blocks.'
    )
    text = f'{measuring.table(cells)}\n\n{sizes}\n\n{measuring.origin(results)}'
    return {'sharding_memory': text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--quick', action='store_true', help='a small model')
    args = parser.parse_args()
    os.environ['CUDA_VISIBLE_DEVICES'] = ''  # it is counted on the CPU
    model = QUICK if args.quick else MODEL
    rows = {
        way: [peak_bytes(ranks, settings, model) / measuring.MIB for ranks in RANKS]
        for way, settings in WAYS.items()
    }
    whole: Any = timm.create_model(**model)
    results = {
        'run': measuring.where(torch.device('cpu'), ()),
        'model': model,
        'block_mib': _size(whole.blocks[0]) / measuring.MIB,
        'rest_mib': (_size(whole) - _size(whole.blocks)) / measuring.MIB,
        'rows': rows,
    }
    measuring.publish(results, 'sharding_memory', tables, args.out, args.page)


if __name__ == '__main__':
    main()
