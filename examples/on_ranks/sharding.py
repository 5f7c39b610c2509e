"""Parameters, gradients and optimiser state spread over ranks, on PyTorch's ``fully_shard``.

    torchrun --nproc_per_node 2 examples/on_ranks/sharding.py

Started without torchrun it is one rank, which holds everything.
"""

import os
import tempfile

import timm
import torch
import torch.distributed as dist
from torch.nn import functional as F

from memengine.techniques import clip_grad_norm_, shard_model


def main() -> None:
    """Train for three steps on this rank's part of the batch."""
    backend = 'nccl' if torch.cuda.is_available() else 'gloo'
    if 'RANK' in os.environ:
        dist.init_process_group(backend)
    else:
        meet = f'file://{tempfile.mkdtemp()}/meet'
        dist.init_process_group(backend, init_method=meet, rank=0, world_size=1)
    torch.manual_seed(0)  # the same model on all ranks
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=32, patch_size=8, depth=4, num_classes=10
    )
    whole = sum(p.nbytes for p in model.parameters()) / 2**20
    sharded = shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # its state is sharded, too
    torch.manual_seed(dist.get_rank())
    device = next(model.parameters()).device
    images, labels = torch.randn(8, 3, 32, 32).to(device), torch.randint(10, (8,)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(sharded(images), labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # by the norm of all ranks' gradients
        optimizer.step()
        print(f'rank {dist.get_rank()}: loss {loss:.3f}')
    here = sum(p.to_local().nbytes for p in model.parameters()) / 2**20
    print(f'parameters: {whole:.1f} MiB, on this rank {here:.1f} MiB')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
