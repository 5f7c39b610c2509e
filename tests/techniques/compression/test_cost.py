"""What compressed activations add to a step in Python, counted by calls and not by time."""

import sys

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memengine._torch_private.compiled_kernels import without_kernels
from memengine.techniques import quantize_activations, recompute_activations
from memengine.techniques.compression.backward_needs import operation_name


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, nn.functional.gelu, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).train()


def step(model):
    model(torch.ones(8, 9, 16)).sum().backward()


def calls_of_a_step(model):
    """How often Python, or what it calls, calls a function in a step after the first few."""
    for _ in range(4):
        step(model)  # of which the first, second and fourth compare results
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ('call', 'c_call')

    sys.setprofile(count)
    try:
        step(model)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    ('technique', 'most'), [(recompute_activations, 25), (quantize_activations, 116)]
)
def test_calls_for_each_saved_tensor(technique, most):
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        step(transformer())
    model = transformer()
    technique(model)
    with without_kernels():  # which spare 30 calls, where there is a compiler
        calls = calls_of_a_step(model)
    assert calls - calls_of_a_step(transformer()) <= most * len(saved)


def test_operations_of_one_class_keep_their_own_names():
    """Nodes without a class of their own, and several people's Functions of one name."""

    def of_somebody(name):
        def forward(ctx, x):
            return x * 2

        methods = {'forward': staticmethod(forward), 'backward': staticmethod(lambda ctx, g: g)}
        return type(name, (torch.autograd.Function,), methods)

    x = torch.ones(3, requires_grad=True)
    changed = x.clone()
    changed[0] = 1
    results = [x.exp(), x.relu(), x.exp(), of_somebody('Gelu').apply(x), changed]
    results += [of_somebody('Gelu').apply(x), of_somebody('GeluBackward0').apply(x)]
    for _ in range(2):
        assert [operation_name(result.grad_fn) for result in results] == [
            'Exp', 'Relu', 'Exp', 'GeluBackward', 'torch::autograd::CopySlices',
            'GeluBackward', 'GeluBackward0Backward',
        ]  # fmt: skip
