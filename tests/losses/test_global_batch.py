"""The losses over ranks: on each the whole batch's value, and after DDP's mean its gradient."""

import pytest
import torch
import torch.distributed as dist

from memengine.testing import assert_same_step, run_ranks

from .cases import CASES, learned, step

TILES = [None, 3, 'auto']
ROWS = {
    'even': {2: [4, 4], 4: [2, 2, 2, 2]},
    'uneven': {2: [3, 5], 4: [1, 3, 2, 2]},
}


def whole(name):
    torch.manual_seed(0)
    return CASES[name].tensors(8)


def part(tensors, rows, rank):
    return {k: v.split(rows)[rank] if v.dim() else v for k, v in tensors.items()}


def _steps(rank, world_size, rows):
    """Loss and gradients of this rank, of each case and tile size."""
    results = {}
    for name, case in CASES.items():
        tensors = part(whole(name), rows, rank)
        for tile_size in TILES:
            loss = case.make(tile_size)
            loss.process_group = dist.group.WORLD
            results[name, tile_size] = step(lambda t, c=case, m=loss: c.call(m, t), tensors)
    return results


@pytest.mark.parametrize('cut', ROWS)
@pytest.mark.parametrize('world_size', [2, 4])
def test_ranks_equal_one_process(world_size, cut):
    rows = ROWS[cut][world_size]
    results = run_ranks(world_size, _steps, rows)
    for name, case in CASES.items():
        tensors = whole(name)
        expected = step(case.formula, tensors)
        for tile_size in TILES:
            ranks = [result[name, tile_size] for result in results]
            for rank in ranks:
                assert_same_step({'loss': rank['loss']}, {'loss': expected['loss']}, 1e-10)
            mean = {'loss': ranks[0]['loss']}
            for key in learned(tensors):
                parts = [rank[key] / world_size for rank in ranks]
                mean[key] = torch.cat(parts) if tensors[key].dim() else sum(parts)
            assert_same_step(mean, expected, 1e-10)
