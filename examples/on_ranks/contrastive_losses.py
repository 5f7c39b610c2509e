"""CLIP's loss over ranks (DisCo): each rank has its rows of the matrix, and the whole gradient.

    torchrun --nproc_per_node 2 examples/on_ranks/contrastive_losses.py

Started without torchrun it is one rank, which has all rows.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from memengine import ClipLoss

PAIRS = 512


def main() -> None:
    """A step of towers in DDP on this rank's pairs, beside one of all pairs in one process."""
    if 'RANK' in os.environ:
        dist.init_process_group('gloo')
    else:
        meet = f'file://{tempfile.mkdtemp()}/meet'
        dist.init_process_group('gloo', init_method=meet, rank=0, world_size=1)
    torch.manual_seed(0)  # the same towers and pairs on all ranks
    towers = nn.ModuleDict({'image': nn.Linear(64, 32), 'text': nn.Linear(48, 32)})
    images, texts = torch.randn(PAIRS, 64), torch.randn(PAIRS, 48)

    def embed(images: torch.Tensor, texts: torch.Tensor) -> list[torch.Tensor]:
        return [F.normalize(wrapped['image'](images)), F.normalize(wrapped['text'](texts))]

    wrapped: dict[str, nn.Module] = dict(towers.items())
    ClipLoss()(*embed(images, texts), torch.tensor(14.3)).backward()
    expected = [p.grad.clone() for p in towers.parameters()]
    towers.zero_grad()

    wrapped = {name: DistributedDataParallel(tower) for name, tower in towers.items()}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * PAIRS // ranks, (rank + 1) * PAIRS // ranks)
    loss = ClipLoss()
    loss.process_group = dist.group.WORLD
    loss(*embed(images[rows], texts[rows]), torch.tensor(14.3)).backward()
    error = max(
        float((p.grad - whole).norm() / whole.norm())
        for p, whole in zip(towers.parameters(), expected, strict=True)
    )
    print(f'rank {rank}: relative difference of the gradients {error:.0e}')
    here = (rows.stop - rows.start) * PAIRS
    print(f'similarities: {4 * PAIRS**2 / 2**20:.1f} MiB, on this rank {4 * here / 2**20:.1f} MiB')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
