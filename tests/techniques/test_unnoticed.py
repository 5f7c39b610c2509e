"""What exact techniques do not notice: each is a wrong gradient without a word, and known.

All are edits that autograd does not count (``.data``, ``F.batch_norm``), or things that no
technique can see: what code reads beside its module, or keeps in objects of it, generators of its
own, samples that meet inside an encoder, what hooks of parameters do with a slice's gradient. In
each the error is beyond the tolerance of ``verify_exactness``.
"""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memengine.techniques import (
    additive_step,
    cached_step,
    checkpoint_activations,
    efficient_conv_bn_eval,
    offload_activations,
    recompute_activations,
)
from memengine.techniques.slices.tower import Tower
from memengine.testing import relative_error
from tests.techniques.toy import cached, plain, try_slices

TOLERANCE = 1e-3  # of verify_exactness in fp32


def gradient(model, x, between=lambda model: None):
    torch.manual_seed(1)
    loss = model(x).square().sum()
    between(model)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def error(model, apply, x, between=lambda model: None, steps=1):
    """Of the last step's gradient."""
    same = copy.deepcopy(model)
    apply(model)
    for _ in range(steps):
        found, expected = gradient(model, x, between), gradient(same, x, between)
    return relative_error(found, expected)


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 6)).double()


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.edge(
    'activation_checkpointing',
    'unnoticed',
    'A weight that is written to through `.data` between forward and backward: the repetition '
    'takes the new one',
)
def test_checkpointing_takes_the_weight_that_it_finds():
    def edit(model):
        model[0].weight.data.mul_(2)

    assert error(network(nn.Tanh()), checkpoint_activations_of_all, rows(4, 6), edit) > TOLERANCE


def checkpoint_activations_of_all(model):
    checkpoint_activations(model, '')


class Counting(nn.Module):
    """Scales by how often it was called, which an array counts."""

    def __init__(self):
        super().__init__()
        self.calls = np.ones(1)

    def forward(self, x):
        self.calls += 1
        return (x * float(self.calls[0])).tanh()


@pytest.mark.edge(
    'activation_checkpointing',
    'unnoticed',
    'What a forward writes into objects that its module holds and that are no dict, list, deque or '
    'set (a NumPy array, an iterator, an object with attributes): the repetition finds it written',
)
def test_checkpointing_does_not_look_into_objects_of_a_module():
    model = network(Counting())
    assert error(model, checkpoint_activations_of_all, rows(4, 6)) > TOLERANCE


SURROUNDINGS = {'scale': 1.0}


class ReadingSurroundings(nn.Module):
    def forward(self, x):
        return (x * SURROUNDINGS['scale']).tanh()


@pytest.mark.edge(
    'activation_checkpointing',
    'unnoticed',
    'What a forward reads beside its module (a global, a file, the time) and what has changed by '
    'backward',
)
def test_checkpointing_does_not_know_what_is_beside_the_module(monkeypatch):
    monkeypatch.setitem(SURROUNDINGS, 'scale', 1.0)

    def change(model):
        SURROUNDINGS['scale'] = 3.0

    def apply(model):
        SURROUNDINGS['scale'] = 1.0
        checkpoint_activations(model, '')

    model, x = network(ReadingSurroundings()), rows(4, 6)
    expected = gradient(copy.deepcopy(model), x, change)
    apply(model)
    assert relative_error(gradient(model, x, change), expected) > TOLERANCE


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.seed = 3

    def begin(self):
        self.generator = random.Random(self.seed)
        return self

    def forward(self, x):
        mask = [self.generator.random() < 0.5 for _ in range(x.numel())]
        return x * torch.tensor(mask).view_as(x)


@pytest.mark.edge(
    'activation_checkpointing',
    'unnoticed',
    'Random numbers from a generator of another library, or that is no attribute of a module '
    'inside (a `random.Random`; NumPy’s global one is replayed): the repetition draws the '
    'next ones',
)
def test_checkpointing_replays_global_generators_only():
    model, x = network(nn.Tanh(), OwnGenerator()), rows(8, 6)
    same = copy.deepcopy(model)
    model[2].begin(), same[2].begin()
    checkpoint_activations(model, '')
    assert relative_error(gradient(model, x), gradient(same, x)) > TOLERANCE


class EndingInNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return F.rrelu(self.layer(x), training=True)


@pytest.mark.edge(
    'activation_checkpointing',
    'unnoticed',
    'A module that ends in `F.rrelu`, where no `nn.RReLU` is inside: the repetition stops before '
    'its noise is filled, as in torch',
)
def test_checkpointing_stops_before_the_noise_of_a_function_is_filled(fresh_memory_is_nan):
    model = EndingInNoise().double()
    checkpoint_activations(model, '')
    assert gradient(model, rows(4, 6)).isnan().any()


class FrozenStatistics(nn.Module):
    """Adds statistics that are parameters, and that F.batch_norm writes without a version."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 6)
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        x = self.layer(x)
        return F.batch_norm(x, self.mean, self.variance, training=True) + x * self.mean.clone()


@pytest.mark.edge(
    'activation_checkpointing',
    'unnoticed',
    'Statistics that are no buffers (parameters without a gradient) and that `F.batch_norm` '
    'writes to: they count twice',
)
def test_checkpointing_copies_no_statistics_that_are_parameters():
    torch.manual_seed(0)
    model, x = FrozenStatistics().double(), rows(8, 12)
    same = copy.deepcopy(model)
    checkpoint_activations(model, '')
    for each in (model, same):
        each(x).square().sum().backward()
    assert relative_error(model.layer.weight.grad, same.layer.weight.grad) > TOLERANCE


@pytest.mark.edge(
    'activation_offload',
    'unnoticed',
    'A tensor that is written to through `.data` after an operation has saved it: what comes back '
    'is as it was saved, where the plain step takes the new one',
)
def test_offload_brings_back_what_was_saved():
    class Writing(nn.Module):
        def forward(self, x):
            y = x.exp()
            y.data.mul_(2)
            return y

    def apply(model):
        offload_activations(model, 'host', min_bytes=0)

    assert error(network(Writing()), apply, rows(4, 6)) > TOLERANCE


@pytest.mark.edge(
    'efficient_conv_bn_eval',
    'unnoticed',
    'A convolution’s output that is written to through `.data` before BatchNorm reads it',
)
def test_conv_bn_does_not_see_data_edits_between_the_two():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()

        def forward(self, x):
            y = self.conv(x)
            y.data.mul_(2)
            return self.norm(y)

    torch.manual_seed(0)
    model = Writing().double()
    assert error(model, efficient_conv_bn_eval, rows(2, 3, 8, 8)) > TOLERANCE


class WritingAt(nn.Module):
    """Writes into its input in one of its calls."""

    def __init__(self, call):
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x):
        self.calls += 1
        x = F.gelu(x)
        if self.calls == self.call:
            x.data.mul_(2)
        return x


@pytest.mark.edge(
    'recomputed_activations',
    'unnoticed',
    'A result that is written to through `.data` in a step in which that place is not compared '
    '(any but its second, fourth, eighth, ... use)',
)
def test_recomputation_does_not_see_data_edits_where_it_does_not_compare():
    model = network(WritingAt(3))
    assert error(model, recompute_activations, rows(4, 6), steps=3) > TOLERANCE


class Centring(nn.Module):
    """Samples meet: each is measured from the mean of those beside it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x):
        x = self.layer(x).tanh()
        return x - x.mean(0)


class WritingIntoItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x):
        x.data.mul_(0.5)
        return self.layer(x)


class Masking(OwnGenerator):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x):
        return super().forward(self.layer(x))


def cached_error(encoder, chunk):
    """Of the gradient cache, against all rows at once or the same slices."""
    torch.manual_seed(0)
    model = encoder().double()
    same, x = copy.deepcopy(model), rows(8, 12)
    for one, step, options in ((model, cached, {}), (same, plain, {'chunk': chunk})):
        if isinstance(one, OwnGenerator):
            one.begin()
        step([one], [x.clone()], lambda z: (z.sum(0) ** 3).sum() + z.square().sum(), **options)
    return max(
        relative_error(p.grad, q.grad)
        for p, q in zip(model.parameters(), same.parameters(), strict=True)
        if p.requires_grad
    )


@pytest.mark.edge(
    'grad_cache',
    'unnoticed',
    'Samples that meet inside an encoder in another way than by BatchNorm (a mean over the batch): '
    'those of a slice do',
)
def test_the_gradient_cache_does_not_know_that_samples_meet_in_an_encoder():
    assert cached_error(Centring, None) > TOLERANCE


@pytest.mark.edge('accumulation', 'unnoticed', 'Hooks of parameters: as for the gradient cache')
@pytest.mark.edge(
    'grad_cache',
    'unnoticed',
    'Hooks of parameters that change a gradient in another way than by a factor (`clamp` in '
    '`register_hook`, anything in `register_post_accumulate_grad_hook`): they run once per slice',
)
@pytest.mark.parametrize('is_additive', [False, True])
@pytest.mark.parametrize('kind', ['clamp', 'accumulated'])
def test_hooks_of_parameters_run_once_per_slice(kind, is_additive):
    def encoder():
        layer = nn.Linear(12, 6)
        if kind == 'clamp':
            layer.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        else:
            layer.weight.register_post_accumulate_grad_hook(halve)
        return layer

    def halve(weight):
        weight.grad.mul_(0.5)

    def gradient_of(step):
        torch.manual_seed(0)
        model = encoder().double()
        step(model, rows(8, 12))
        return model.weight.grad

    def in_slices(model, x):
        loss = lambda z: z.square().sum()  # noqa: E731
        if is_additive:
            additive_step(x.split(4), lambda part: loss(model(part)))
        else:
            cached_step(Tower(model, x.split(4)), loss)

    expected = gradient_of(lambda model, x: model(x).square().sum().backward())
    assert relative_error(gradient_of(in_slices), expected) > TOLERANCE


@pytest.mark.edge(
    'accumulation', 'unnoticed', 'Samples that meet inside an encoder: as for the gradient cache'
)
def test_slices_of_an_encoder_in_which_samples_meet_have_another_gradient():
    torch.manual_seed(0)
    model, x = Centring().double(), rows(8, 12)
    whole, parts = (
        torch.autograd.grad(
            sum(model(part).square().sum() for part in x.split(size)), model.layer.weight
        )[0]
        for size in (8, 4)
    )
    assert relative_error(parts, whole) > TOLERANCE


@pytest.mark.edge(
    'grad_cache',
    'unnoticed',
    'An encoder that writes into its input through `.data`: the second pass writes once more',
)
def test_the_gradient_cache_does_not_see_data_edits_of_the_input():
    assert cached_error(WritingIntoItsInput, None) > TOLERANCE


@pytest.mark.edge(
    'grad_cache',
    'unnoticed',
    'Statistics that are no buffers (parameters without a gradient) and that `F.batch_norm` '
    'writes to: they count twice',
)
def test_the_gradient_cache_copies_no_statistics_that_are_parameters():
    assert cached_error(FrozenStatistics, 4) > TOLERANCE


@pytest.mark.edge(
    'grad_cache',
    'unnoticed',
    'Random numbers from such generators: the second pass draws the next ones',
)
def test_the_gradient_cache_replays_global_generators_only():
    assert cached_error(Masking, 4) > TOLERANCE


@pytest.mark.edge(
    'accumulation',
    'unnoticed',
    'Tensors that modules keep in attributes, lists or dicts, where memory ends in the middle of a '
    'step: what the failed try has left of them stays',
)
def test_a_repeated_step_finds_the_tensors_that_the_failed_one_has_kept():
    class Queue(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.seen = [torch.zeros(4)]

        def forward(self, x):
            self.seen.append(x.detach().mean(0))
            return super().forward(x - torch.stack(self.seen).mean(0))

    def gradient_of(*sizes):
        torch.manual_seed(0)
        model = Queue()
        try_slices(model, torch.rand(8, 4) + 3, *sizes)
        return model.weight.grad

    assert relative_error(gradient_of(4, 2), gradient_of(2)) > TOLERANCE
