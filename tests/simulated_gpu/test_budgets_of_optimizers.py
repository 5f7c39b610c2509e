"""How many kernels an optimiser's step takes, and how many are the least."""

import pytest
import timm
import torch

from memengine.engine.optim import OptimizerInBackwardOptimWrapper
from memengine.techniques import AdamWBf16
from memengine.techniques.optimizer_memory.in_backward import step_in_backward

pytestmark = pytest.mark.gpu
PARAMETERS = 152


def network():
    torch.manual_seed(0)
    model = timm.create_model(
        'vit_tiny_patch16_224', embed_dim=48, num_heads=3, num_classes=4, img_size=32, depth=12
    )
    assert len(list(model.parameters())) == PARAMETERS
    return model.cuda()


def kernels_of_step(device, model, optimizer):
    images = torch.randn(2, 3, 32, 32, device='cuda')
    for _ in range(2):
        model(images).square().mean().backward()
        with device.counted() as counts:
            optimizer.step()
        optimizer.zero_grad()
    assert not counts.waits
    return sum(counts.kernels.values())


def test_all_parameters_are_rounded_together(device):
    model = network()
    plain = kernels_of_step(device, model, torch.optim.AdamW(model.parameters()))
    assert kernels_of_step(device, model, AdamWBf16(model.parameters())) <= plain + 32


def test_on_a_gpu_what_is_not_finite_stays_so():
    weight = torch.nn.Parameter(torch.zeros(64, device='cuda'))
    optimizer = AdamWBf16([weight])
    weight.grad = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32, device='cuda').view(
        torch.float32
    )
    optimizer.step()
    assert optimizer.state[weight]['exp_avg'].isnan().all()


def test_in_backward_a_parameter_takes_one_kernel(device):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    OptimizerInBackwardOptimWrapper(optimizer)
    images = torch.randn(2, 3, 32, 32, device='cuda')
    for _ in range(2):
        loss = model(images).square().mean()
        with device.counted() as counts, step_in_backward(optimizer):
            loss.backward()
    assert counts.kernels['aten::_fused_adamw_'] == PARAMETERS
    assert not [name for name in counts.kernels if 'foreach_addcdiv' in name]


def test_who_has_chosen_is_left_alone():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    OptimizerInBackwardOptimWrapper(optimizer)
    assert optimizer.param_groups[0]['fused'] is None
