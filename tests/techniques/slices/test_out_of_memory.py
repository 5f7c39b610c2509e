"""Repeating a step that ran out of memory, in any loop."""

import gc
import weakref

import pytest
import torch
from torch import nn

from memengine.techniques.compression.quantized_activations import quantize_activations
from memengine.techniques.modules.private_random import (
    private_generator,
    restart_private_generators,
)
from memengine.techniques.slices.out_of_memory import is_out_of_memory, run_until_it_fits
from tests.techniques.toy import try_slices


def test_what_the_allocators_say():
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**50)
    assert is_out_of_memory(real.value)
    assert is_out_of_memory(torch.OutOfMemoryError('CUDA out of memory.'))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError('shape mismatch'))
    assert not is_out_of_memory(ValueError('out of memory'))


@pytest.mark.parametrize(
    'message',
    [
        'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`',
        'CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`',
        'cuDNN error: CUDNN_STATUS_NOT_INITIALIZED',
        'cuDNN error: CUDNN_STATUS_ALLOC_FAILED',
        'cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`',
        'MPS backend out of memory (MPS allocated: 9.06 GB)',
        'NCCL error: unhandled cuda error. Last error: Cuda failure 2 "out of memory"',
    ],
)
def test_what_libraries_say_that_find_no_memory(message):
    assert is_out_of_memory(RuntimeError(message))


def test_an_allocation_that_fails_for_real():
    model, sizes = nn.Linear(2, 2), [2**50, 2**3]

    def step():
        return torch.empty(sizes[0]).numel()

    assert run_until_it_fits(step, lambda: bool(sizes.pop(0)), model) == 2**3


def test_generators_buffers_and_gradients_are_put_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    model(torch.ones(5, 3)).sum().backward()  # of an earlier iteration
    model[1].weight.grad = None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient, drawn = model[0].weight.grad.clone(), []

    def step():
        private = torch.rand(2, generator=private_generator(torch.device('cpu')))
        drawn.append(torch.cat([torch.rand(2), private]))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        assert torch.equal(model[0].weight.grad, gradient)
        assert model[1].weight.grad is None
        model(torch.randn(5, 3)).sum().backward()
        if len(drawn) < 3:
            raise torch.OutOfMemoryError('CUDA out of memory.')

    run_until_it_fits(step, lambda: True, model)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize('how', [dict(bits=2), dict(bits=8), dict(ranges='running')], ids=str)
def test_quantised_activations_are_what_the_smaller_slices_would_have_made_them(how):
    def gradient_of_slices(*sizes):
        torch.manual_seed(0)
        restart_private_generators()
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        with quantize_activations(model, **how, min_numel=1):
            try_slices(model, torch.rand(8, 8), *sizes)
        return model[0].weight.grad

    assert torch.equal(gradient_of_slices(4, 2), gradient_of_slices(2))
    assert not torch.equal(gradient_of_slices(4), gradient_of_slices(2))


class Stateful(nn.Module):
    """Replaces a buffer in each forward, counts, and keeps what it has seen and computed."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.means, self.kept = nn.Linear(4, 4), 0, [], None
        self.register_buffer('mean', torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.means.append(float(x.mean()))
        self.kept = self.layer(x - self.mean) * 0.9**self.calls
        return self.kept


@pytest.mark.edge(
    'accumulation',
    'exact',
    'Memory that ends in the middle of a step: what modules count, and buffers that they replace '
    'or write to, are as smaller slices would have left them',
)
def test_what_modules_replace_is_put_back():
    def after_slices(*sizes):
        torch.manual_seed(0)
        model = Stateful()
        try_slices(model, torch.rand(8, 4) + 3, *sizes)
        return model

    tried, small = after_slices(4, 2), after_slices(2)
    assert (tried.calls, tried.means) == (small.calls, small.means)
    for one, other in zip(tried.state_dict().values(), small.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(tried.layer.weight.grad, small.layer.weight.grad)


def test_what_a_module_keeps_is_not_held_for_the_next_try():
    model = Stateful()
    model(torch.rand(2, 4))
    kept = weakref.ref(model.kept)

    def step():
        model(torch.rand(2, 4))
        assert kept() is None

    run_until_it_fits(step, lambda: False, model)


@pytest.mark.edge(
    'accumulation',
    'refused',
    'Memory that ends in a step whose model has written into its batch: it is not repeated',
)
def test_a_batch_that_was_written_to_is_not_taken_for_the_batch():
    model, images = nn.Linear(4, 4), torch.rand(8, 4)

    def step():
        model(images[:4].sub_(0.5)).sum().backward()
        raise torch.OutOfMemoryError('CUDA out of memory.')

    with pytest.raises(torch.OutOfMemoryError, match=r'written into its batch .*micro_batch_size'):
        run_until_it_fits(step, lambda: True, model, inputs=dict(images=[images]))


def test_the_failed_step_leaves_no_tensor_behind():
    model, seen = nn.Linear(2, 2), []

    def step():
        big = model(torch.ones(4, 2))
        seen.append(weakref.ref(big))
        if len(seen) == 1:
            raise torch.OutOfMemoryError('CUDA out of memory.')
        assert seen[0]() is None  # before anything is allocated again
        return 'done'

    gc.disable()
    try:
        assert run_until_it_fits(step, lambda: True, model) == 'done'
    finally:
        gc.enable()
