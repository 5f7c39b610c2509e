"""Ranks of which one runs out of memory in a step of plain torch: they end together."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memengine.techniques.slices.out_of_memory import run_until_it_fits
from memengine.testing import run_ranks


def fail():
    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')


class Normalised(nn.Module):
    """A layer that exchanges data in forward, as SyncBatchNorm does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer('seen', torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        mean = x.mean(0)
        dist.all_reduce(mean)
        self.seen += 1
        return self.layer(x - mean)


def outcome_of(step, sizes, model, group):
    try:
        return run_until_it_fits(step, lambda: len(sizes) > 1 and bool(sizes.pop(0)), model, group)
    except torch.OutOfMemoryError as error:
        return str(error).partition('.')[0]


def _rank(rank, world_size):
    """What comes of steps in which rank 1 runs out of memory."""
    group = dist.new_group(backend='gloo')
    torch.manual_seed(0)
    model = DistributedDataParallel(Normalised())  # whose buffers rank 0 broadcasts
    x = torch.arange(8, dtype=torch.float64).view(4, 2) * (rank + 1)

    def step(fits):
        for piece in x.split(sizes[0]):
            with model.no_sync():
                model(piece).square().sum().backward()
            if rank == 1 and not fits(sizes[0]):
                fail()
        model(x[:1]).sum().backward()
        return sizes[0]

    found, gradients = {}, []
    for name, fits, sizes in (
        ('small', lambda size: True, [1]),
        ('repeated', lambda size: size == 1, [4, 2, 1]),
        ('never', lambda size: False, [2, 1]),
    ):
        model.zero_grad()
        model.module.seen.zero_()
        found[name] = outcome_of(lambda fits=fits: step(fits), sizes, model, group)
        gradients.append([p.grad.clone() for p in model.parameters()])
    small, repeated, _ = gradients
    found['same'] = all(map(torch.equal, small, repeated))

    others = dist.new_group(backend='gloo')

    def with_a_thread_that_speaks():
        """On this rank earlier than on the other, which no step may wait for."""
        thread = threading.Thread(target=dist.barrier, args=[others])
        if rank == 0:
            thread.start()
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            thread.start()
        thread.join()
        return 'done'

    found['thread'] = outcome_of(with_a_thread_that_speaks, [1], model, group)
    return found


@pytest.mark.slow
def test_all_ranks_repeat_a_step_or_all_end():
    first, second = run_ranks(2, _rank, timeout_s=600)
    same = dict(small=1, repeated=1, same=True, thread='done')
    assert first == {**same, 'never': 'another rank ran out of memory in this step'}
    assert second == {**same, 'never': 'CUDA out of memory'}


def _rank_in_a_collective(rank, world_size):
    """A collective that itself runs out of memory on rank 1, while rank 0 is in it."""
    library = torch.library.Library('c10d', 'IMPL')
    if rank == 1:
        library.impl('_allgather_base_', lambda *args: fail(), 'CPU')
    both = torch.empty(2)
    run_until_it_fits(
        lambda: dist.all_gather_into_tensor(both, torch.ones(1)),
        lambda: True,
        nn.Linear(1, 1),
        dist.new_group(backend='gloo'),
    )


@pytest.mark.slow
def test_a_collective_that_runs_out_of_memory_is_the_end_of_all():
    with pytest.raises(RuntimeError, match=r'rank [01] of 2 failed'):
        run_ranks(2, _rank_in_a_collective, timeout_s=600)
