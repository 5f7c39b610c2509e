"""What is computed again lies in memory as it did, whatever its operations would choose by now."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memengine.techniques import quantize_activations, recompute_activations

FORMATS = [torch.contiguous_format, torch.channels_last]


class Casting(nn.Module):
    """A cast that asks for a memory format, and a layer that reads a view of its result."""

    def __init__(self, memory_format, flat):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(2, 16)
        self.second = (nn.Linear(256, 4) if flat else nn.Conv2d(16, 4, 3)).double()
        self.memory_format, self.flat = memory_format, flat

    def forward(self, x):
        x = F.gelu(self.norm(self.first(x))).to(torch.float64, memory_format=self.memory_format)
        return self.second(x.flatten(1) if self.flat else x)


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


@pytest.mark.edge(
    'recomputed_activations',
    'exact',
    'A cast to a memory format of its own, of inputs whose format changes from step to step',
)
@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('memory_format', FORMATS)
@pytest.mark.parametrize('of_input', [FORMATS, FORMATS[::-1]])
def test_a_cast_to_a_memory_format(memory_format, of_input, flat):
    torch.manual_seed(0)
    model = Casting(memory_format, flat)
    plain = copy.deepcopy(model)
    handle = recompute_activations(model)
    for step in range(8):
        x = torch.randn(2, 4, 4, 4).contiguous(memory_format=of_input[step in (2, 4, 5, 6)])
        for found, expected in zip(gradients(model, x), gradients(plain, x), strict=True):
            assert torch.equal(found, expected)
    assert handle.kept.places


@pytest.mark.parametrize('memory_format', FORMATS)
@pytest.mark.parametrize('of_input', [FORMATS, FORMATS[::-1]])
def test_the_same_from_codes(memory_format, of_input):
    torch.manual_seed(0)
    model = Casting(memory_format, flat=False)
    plain = copy.deepcopy(model)
    recompute_activations(model)
    quantize_activations(model, bits=8)
    for step in range(8):
        x = torch.randn(2, 4, 4, 4).contiguous(memory_format=of_input[step in (2, 4, 5, 6)])
        for found, expected in zip(gradients(model, x), gradients(plain, x), strict=True):
            assert (found - expected).norm() < 0.05 * expected.norm()
