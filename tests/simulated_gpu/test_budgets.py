"""What a training step of each technique asks of a device: waits of the host, and kernels."""

import pytest
import timm
import torch
from torch.nn import functional as F

from memengine.losses import ClipLoss, NTXentLoss, SigLipLoss, SupConLoss
from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    checkpoint_activations,
)
from memengine.techniques.activation_offload import offload_activations
from memengine.techniques.compression.dropit import drop_activations
from memengine.techniques.compression.quantized_activations import quantize_activations
from memengine.techniques.compression.recomputed_activations import recompute_activations

pytestmark = pytest.mark.gpu


def vit():
    return timm.create_model(
        'vit_tiny_patch16_224',
        num_classes=10,
        img_size=32,
        patch_size=8,
        depth=4,
        proj_drop_rate=0.1,
    )


def resnet():
    return timm.create_model('resnet18', num_classes=10)


TECHNIQUES = {
    'plain': lambda model: None,
    'checkpointed': lambda model: checkpoint_activations(model, 'blocks'),
    'selective': lambda model: checkpoint_activations(model, 'blocks', keep='matmuls'),
    'offloaded': lambda model: offload_activations(model, 'host', min_bytes=256),
    'recomputed': recompute_activations,
    'mink': drop_activations,
    'random': lambda model: drop_activations(model, 'random'),
    'block_mink, few': lambda model: drop_activations(model, 'block_mink', 0.9),
    'block_mink, half': lambda model: drop_activations(model, 'block_mink', 0.5),
    'block_mink, rows': lambda model: drop_activations(model, 'block_mink', 0.5, block_size='row'),
    '8 bits': lambda model: quantize_activations(model, 8, min_numel=64),
    '4 bits': lambda model: quantize_activations(model, 4, min_numel=64),
    'running ranges': lambda model: quantize_activations(model, ranges='running', min_numel=64),
    'recomputed, mink': lambda model: (recompute_activations(model), drop_activations(model)),
    'recomputed, 4 bits': lambda model: (
        recompute_activations(model),
        quantize_activations(model, 4),
    ),
}


# Operations of a step of the ViT: torch's own, as kernels of ours do not run there.
MOST_OPERATIONS = {
    'plain': 239,
    'checkpointed': 335,
    'offloaded': 239,
    'recomputed': 484,
    'block_mink, few': 738,
    'recomputed, mink': 684,
    'mink': 1188,
    'random': 1224,
    '8 bits': 2550,
    '4 bits': 2797,
    'running ranges': 3418,
}


def counts_of_steps(device, network, technique, steps):
    torch.manual_seed(0)
    model = network().cuda().train()
    TECHNIQUES[technique](model)
    images, labels = torch.randn(4, 3, 32, 32, device='cuda'), torch.arange(4, device='cuda')
    for _ in range(steps):
        model.zero_grad()
        with device.counted() as counts:
            F.cross_entropy(model(images), labels).backward()
        yield counts


@pytest.mark.parametrize('technique', TECHNIQUES)
@pytest.mark.parametrize('network', [vit, resnet])
def test_no_step_but_the_first_waits_for_the_device(device, network, technique):
    first, *others = counts_of_steps(device, network, technique, 3)
    assert [dict(counts.waits) for counts in others] == [{}, {}]
    if 'recomputed' not in technique:  # which decides in the first step
        of_proofs = 'codecs/kernels/'  # of kernels, once in a process
        assert not [line for line in first.waits if of_proofs not in line]
    if network is vit and technique in MOST_OPERATIONS:
        assert others[-1].kernels.total() <= MOST_OPERATIONS[technique]


LOSSES = {  # of embeddings [2, 6, D], with labels
    'NT-Xent': lambda z, labels: NTXentLoss(0.5)(z[0], z[1]),
    'NT-Xent, tiled': lambda z, labels: NTXentLoss(0.5, tile_size=4)(z[0], z[1]),
    'SupCon': lambda z, labels: SupConLoss(0.1)(z.transpose(0, 1), labels),
    'CLIP': lambda z, labels: ClipLoss()(z[0], z[1], 10.0),
    'CLIP, tiled': lambda z, labels: ClipLoss(tile_size=4)(z[0], z[1], 10.0),
    'sigmoid': lambda z, labels: SigLipLoss()(z[0], z[1], 10.0, -10.0),
    'sigmoid, tiled': lambda z, labels: SigLipLoss(tile_size=4)(z[0], z[1], 10.0, -10.0),
}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('loss', LOSSES)
def test_no_loss_waits_for_the_device(device, loss, dtype):
    host = torch.randn(2, 6, 16).to(dtype), torch.tensor([0, 1, 0, 7, 1, 3])
    embeddings, labels = host[0].cuda().requires_grad_(), host[1].cuda()
    with device.counted() as counts:
        found = LOSSES[loss](embeddings, labels)
        found.backward()
    assert not counts.waits
    torch.testing.assert_close(found.cpu(), LOSSES[loss](*host))
