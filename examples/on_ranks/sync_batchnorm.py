"""BatchNorm over all ranks' samples: what one process would train on the whole batch.

    torchrun --nproc_per_node 2 examples/on_ranks/sync_batchnorm.py

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

from memengine.techniques.layers.sync_batchnorm import convert_sync_batchnorm


def main() -> None:
    """A step on this rank's part of the batch, beside one of the whole batch in one process."""
    if 'RANK' in os.environ:
        dist.init_process_group('gloo')
    else:
        meet = f'file://{tempfile.mkdtemp()}/meet'
        dist.init_process_group('gloo', init_method=meet, rank=0, world_size=1)
    torch.manual_seed(0)  # the same model and batch on all ranks
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    plain = nn.Sequential(*layers, nn.Linear(8 * 14 * 14, 10))
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
    synced = copy.deepcopy(plain)
    convert_sync_batchnorm(synced)
    model = DistributedDataParallel(synced)
    F.cross_entropy(plain(images), labels).backward()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
    F.cross_entropy(model(images[part]), labels[part]).backward()
    error = max(
        float((p.grad - whole.grad).norm() / whole.grad.norm())
        for p, whole in zip(model.parameters(), plain.parameters(), strict=True)
    )
    print(f'rank {rank}: relative difference of the gradients {error:.0e}')
    whole, here = images.nbytes / 2**20, images[part].nbytes / 2**20
    print(f'batch: {whole:.3f} MiB, on this rank {here:.3f} MiB')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
