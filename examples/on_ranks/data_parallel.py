"""Slices within data parallel: torch's DDP reduces the gradients once, in the last slice.

    torchrun --nproc_per_node 2 examples/on_ranks/data_parallel.py

Started without torchrun it is one rank, which has the whole batch.
"""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from memengine.techniques import additive_step, split_batch


def main() -> None:
    """A step on this rank's part of the batch, beside one of the whole batch in one process."""
    if 'RANK' in os.environ:
        dist.init_process_group('gloo')
    else:
        meet = f'file://{tempfile.mkdtemp()}/meet'
        dist.init_process_group('gloo', init_method=meet, rank=0, world_size=1)
    torch.manual_seed(0)  # the same model and batch on all ranks
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    images, labels = torch.randn(64, 64), torch.randint(10, (64,))
    model = DistributedDataParallel(copy.deepcopy(plain))
    F.cross_entropy(plain(images), labels).backward()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * 64 // ranks, (rank + 1) * 64 // ranks)

    def loss_of(piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = piece
        return F.cross_entropy(model(inputs), targets, reduction='sum') * ranks / 64

    slices = split_batch((images[mine], labels[mine]), 8)
    additive_step(slices, loss_of, modules=[model])
    error = max(
        float((p.grad - whole.grad).norm() / whole.grad.norm())
        for p, whole in zip(model.parameters(), plain.parameters(), strict=True)
    )
    print(f'rank {rank}: relative difference of the gradients {error:.0e}')
    whole, here = images.nbytes / 2**20, images[mine].nbytes / 2**20
    print(f'batch: {whole:.3f} MiB, on this rank {here:.3f} MiB')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
