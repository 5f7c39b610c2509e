"""One of two ranks on the simulated device: rank 1 runs out of memory here and there in a step.

``python -m tests.simulated_gpu.two_ranks RANK FOLDER``; exit status 0 where both ranks then have
the gradients of the smaller slices.
"""

import sys
from contextlib import contextmanager

from tests.simulated_gpu import device  # isort: skip (before torch)

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memengine._torch_private.distributed import around_collectives
from memengine.losses import NTXentLoss
from memengine.losses.gather import rows_per_rank
from memengine.techniques import Tower, cached_step, split_batch
from memengine.techniques.slices.out_of_memory import run_until_it_fits

STRIDE = 3


def main(rank: int, folder: str) -> None:
    dist.init_process_group('gloo', init_method=f'file://{folder}/ranks', rank=rank, world_size=2)
    group = dist.new_group(backend='gloo')
    torch.manual_seed(rank)
    images = torch.rand(8, 3, device='cuda')
    rows_per_rank(images)  # the first time the device is asked, and the host's group made
    with device.counted() as counts:
        assert rows_per_rank(images) == [8, 8]
    assert not counts.waits, counts.waits
    loss = NTXentLoss(0.5)
    loss.process_group = dist.group.WORLD
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
    network = nn.Sequential(*layers).cuda()
    model = DistributedDataParallel(network, broadcast_buffers=False, bucket_cap_mb=1e-5)

    in_collectives: set[int] = set()  # where gloo, unlike NCCL, allocates: the end of both ranks

    @contextmanager
    def noted():
        before = device.allocations()
        yield
        in_collectives.update(range(before + 1, device.allocations() + 1))

    def train(size, refused=0, group=group):
        model.zero_grad()
        network[1].reset_running_stats()
        torch.manual_seed(1)
        sizes = [size, 2]

        def step():
            towers = Tower(model, split_batch(images, sizes[0]))
            cached_step(towers, lambda z: loss(*z.chunk(2)))

        with device.refusing(refused if rank == 1 else 0):
            run_until_it_fits(step, lambda: bool(sizes.pop(0)), model, group)
            count = device.allocations()
        return sizes[0], count, [p.grad.clone() for p in model.parameters()]

    train(4), train(2)  # DDP orders its buckets in the second
    with device.counted() as counts:
        train(4)
    assert not counts.waits, counts.waits
    with around_collectives(noted):
        _, count, large = train(4, group=None)
    _, _, small = train(2)
    places = [[n for n in range(1, count + 1, STRIDE) if n not in in_collectives]]
    dist.broadcast_object_list(places, src=1)
    halved = 0
    for refused in places[0]:
        size, _, gradients = train(4, refused)
        expected = small if size == 2 else large
        assert all(map(torch.equal, gradients, expected)), refused
        halved += size == 2
    print(f'rank {rank}: {halved} of {len(places[0])} steps repeated')
    dist.barrier()


if __name__ == '__main__':
    main(int(sys.argv[1]), sys.argv[2])
