"""Gradient cache with all that makes an encoder hard to run twice."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memengine.losses import ClipLoss, NTXentLoss
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.slicing import split_batch
from memengine.testing import assert_same_step, relative_error
from tests.techniques.toy import CHUNK, Case, Encoder, cached, gradients, plain, train


@pytest.mark.edge(
    'grad_cache',
    'exact',
    'BatchNorm’s running statistics: each slice counts once, in order',
)
@pytest.mark.parametrize('momentum', [0.1, None])
@pytest.mark.parametrize('keep_graph', [0, 1, 3])
def test_batchnorm_counts_every_slice_once_and_in_order(momentum, keep_graph):
    torch.manual_seed(0)
    model = Encoder(0.2, nn.BatchNorm1d(16, momentum=momentum)).double()
    expected, x = copy.deepcopy(model), torch.randn(12, 12, dtype=torch.float64)
    loss_fn = lambda z: NTXentLoss()(*z.chunk(2))  # noqa: E731
    for step in range(3):
        torch.manual_seed(step)
        plain([expected], [x], loss_fn)
        torch.manual_seed(step)
        cached([model], [x], loss_fn, keep_graph=keep_graph)
    assert model.layers[1].num_batches_tracked == 9
    assert model.layers[1].track_running_stats
    assert_same_step(model.state_dict(), expected.state_dict())
    assert_same_step(gradients(model), gradients(expected))


def test_batchnorm_in_eval_mode_uses_its_running_statistics():
    model = Encoder(0.2, nn.BatchNorm1d(16)).double().eval()
    x = torch.randn(12, 12, dtype=torch.float64)
    expected, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    loss_fn = lambda z: NTXentLoss()(*z.chunk(2))  # noqa: E731
    plain([expected], [x], loss_fn, chunk=None)
    cached([model], [x], loss_fn)
    assert_same_step(gradients(model), gradients(expected))
    assert_same_step(model.state_dict(), before, tolerance=0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 6)
        self.register_buffer('steps', torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.linear(x)


@pytest.mark.edge(
    'grad_cache',
    'refused',
    'A buffer other than a norm’s statistics that every forward changes',
)
def test_another_buffer_that_changes_is_refused():
    with pytest.raises(RuntimeError, match='steps of Counting changes'):
        cached([Counting()], [torch.randn(8, 12)], torch.Tensor.sum)


class Silent(nn.Module):
    """Normalises by statistics of its own, which F.batch_norm writes without a version."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer('mean', torch.zeros(features))
        self.register_buffer('variance', torch.ones(features))

    def forward(self, x):
        y = F.batch_norm(x, self.mean, self.variance, training=True)
        return y + x * self.mean.clone()  # autograd saves the clone


class OwnBatchNorm(nn.BatchNorm1d):
    """Gives its statistics to F.batch_norm whatever ``track_running_stats`` says."""

    def forward(self, x):
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, 0.3)


@pytest.mark.edge(
    'grad_cache',
    'exact',
    'Small buffers that `F.batch_norm` or a fused observer writes to without counting a version '
    '(but where DDP sends buffers in each forward), and running statistics of a subclass of '
    'BatchNorm: once, and the second pass reads what the first has read',
)
@pytest.mark.parametrize('keep_graph', [0, 1])
@pytest.mark.parametrize('norm', [Silent, OwnBatchNorm])
def test_buffers_that_are_written_to_without_a_version_count_once(norm, keep_graph):
    torch.manual_seed(0)
    model, x = Encoder(norm=norm(16)).double(), torch.randn(10, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    plain([expected], [x], lambda z: (z.sum(0) ** 3).sum())
    cached([model], [x], lambda z: (z.sum(0) ** 3).sum(), keep_graph=keep_graph)
    assert_same_step(gradients(model), gradients(expected))
    assert_same_step(model.state_dict(), expected.state_dict())


class Rescaled(nn.Linear):
    """Rescales its weight by the first batch that it sees, and notes in a buffer that it has."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer('is_rescaled', torch.tensor(False))

    def forward(self, x):
        if not self.is_rescaled:
            with torch.no_grad():
                self.weight.div_(x.std(0))
                self.is_rescaled.fill_(True)
        return super().forward(x)


@pytest.mark.parametrize('keep_graph', [0, 1])
def test_what_is_done_once_by_a_flag_in_a_buffer_is_not_done_again(keep_graph):
    torch.manual_seed(0)
    model, x = nn.Sequential(Rescaled(4, 4), nn.Tanh()).double(), torch.randn(6, 4).double()
    expected = copy.deepcopy(model)
    loss_fn = lambda z: (z.sum(0) ** 3).sum()  # noqa: E731
    loss_fn(torch.cat([expected(piece) for piece in x.split(3)])).backward()
    cached_step(Tower(model, x.split(3)), loss_fn, keep_graph=keep_graph)
    assert_same_step(gradients(model), gradients(expected))
    assert_same_step(model.state_dict(), expected.state_dict())


@pytest.mark.edge('grad_cache', 'exact', 'A loss that changes embeddings in place')
@pytest.mark.parametrize('keep_graph', [0, 1])
def test_a_loss_may_change_the_embeddings_in_place(keep_graph):
    torch.manual_seed(0)
    model, x = Encoder().double(), torch.randn(10, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    loss_fn = lambda z: (z.mul_(2).sum(0) ** 3).sum()  # noqa: E731
    plain([expected], [x], loss_fn)
    cached([model], [x], loss_fn, keep_graph=keep_graph)
    assert_same_step(gradients(model), gradients(expected))


@pytest.mark.edge('grad_cache', 'refused', 'An encoder that writes into its input')
def test_an_encoder_that_changes_its_input_is_refused():
    encoder = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 6))
    with pytest.raises(ValueError, match='Sequential changes its input in place.*keep_graph'):
        cached([encoder], [torch.randn(8, 12)], torch.Tensor.sum)


class Keeping(nn.Module):
    """Keeps something beside its parameters, in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.linear = nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.way, self.calls, self.ready, self.kept = way, 0, False, {}
        self.register_buffer('grid', torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        if self.way == 'a result':
            self.kept.setdefault('scale', self.scale.exp())
            return self.linear(x) * self.kept['scale']
        if self.way == 'a result and a flag':
            if not self.ready:
                self.grid, self.ready = self.scale.exp(), True
            return self.linear(x) * self.grid
        if self.way == 'a random constant':
            if not self.kept:
                self.kept['mask'] = torch.rand(6, dtype=x.dtype)
            return F.dropout(self.linear(x) * self.kept['mask'] * self.scale, 0.3)
        if self.way == 'a buffer for each size':
            if len(self.grid) != len(x):
                self.grid = torch.ones(len(x), dtype=x.dtype)
            return self.linear(x) * self.scale * self.grid[:, None]
        self.last = self.linear(x) * self.scale * self.calls  # how often it was called
        return self.last


RESULTS = ['a result', 'a result and a flag']
OTHERS = ['a random constant', 'a buffer for each size', 'how often it was called']


@pytest.mark.edge(
    'grad_cache',
    'exact',
    'A buffer or attribute that is computed in the first call only (ConViT)',
)
@pytest.mark.parametrize('way', RESULTS)
def test_a_result_that_is_kept_has_no_graph_in_slices_that_keep_theirs(way):
    with pytest.raises(RuntimeError, match=r'computed from parameters in one .* set keep_graph=0'):
        cached([Keeping(way)], [torch.randn(10, 12)], lambda z: z.square().sum(), keep_graph=1)


@pytest.mark.edge(
    'grad_cache',
    'exact',
    'What a forward keeps on its module: the second pass finds what the first found',
)
@pytest.mark.parametrize(
    ('way', 'keep_graph'), [*((way, 0) for way in RESULTS + OTHERS), *((way, 1) for way in OTHERS)]
)
def test_what_a_forward_keeps_on_its_module_is_as_it_was_in_the_second(way, keep_graph):
    torch.manual_seed(0)
    model, x = Keeping(way).double(), torch.randn(10, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    for module, step in ((expected, plain), (model, lambda *a: cached(*a, keep_graph=keep_graph))):
        torch.manual_seed(1)
        step([module], [x], lambda z: (z.sum(0) ** 3).sum())
    assert_same_step(gradients(model), gradients(expected))
    assert model.calls == expected.calls == 3
    assert model.ready == expected.ready and model.grid.equal(expected.grid)
    assert model.kept.keys() == expected.kept.keys()


class OtherRandomness(nn.Module):
    """Skips and masks by Python's and NumPy's generators."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 6)

    def forward(self, x):
        import numpy as np

        return self.linear(x * np.random.rand()) * random.random()


@pytest.mark.edge('grad_cache', 'exact', 'Random numbers of Python and NumPy')
def test_randomness_of_python_and_numpy_is_replayed():
    import numpy as np

    torch.manual_seed(0)
    model, x = OtherRandomness().double(), torch.randn(9, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    for module, step in ((expected, plain), (model, cached)):
        random.seed(0), np.random.seed(0)
        step([module], [x], lambda z: (z.sum(0) ** 3).sum())
    assert_same_step(gradients(model), gradients(expected))


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.generator = nn.Linear(12, 6), None

    def forward(self, x):
        x = self.linear(x)
        return x * (torch.rand(x.shape, generator=self.generator) < 0.5)


@pytest.mark.edge(
    'grad_cache',
    'exact',
    'Random numbers from a `torch.Generator` that a module inside has as an attribute',
)
def test_a_generator_of_a_modules_own_is_replayed():
    torch.manual_seed(0)
    model, x = OwnGenerator().double(), torch.randn(9, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    for module, step in ((expected, plain), (model, cached)):
        module.generator = torch.Generator().manual_seed(3)
        step([module], [x], lambda z: (z.sum(0) ** 3).sum())
    assert_same_step(gradients(model), gradients(expected))
    assert torch.equal(model.generator.get_state(), expected.generator.get_state())


class Nested(nn.Module):
    """A dict in; out a tuple of a dict, of rows that come twice and of integers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 5), nn.Linear(12, 3)
        self.unused = nn.Linear(12, 3)

    def forward(self, *, image, flags, double):
        a = self.a(image * flags[:, None])
        return {'a': a, 'twice': torch.cat([a, a]) if double else a}, self.b(image), flags.long()


def test_nested_inputs_and_outputs():
    torch.manual_seed(0)
    model = Nested().double()
    expected = copy.deepcopy(model)
    batch = {
        'image': torch.randn(10, 12, dtype=torch.float64),
        'flags': torch.randint(2, (10,)).double(),
        'double': True,
    }

    def loss_fn(outputs):
        tree, b, flags = outputs
        assert (len(tree['a']), len(tree['twice'])) == (10, 20)
        assert torch.equal(flags, batch['flags'].long())
        return (tree['a'] ** 2).sum() + (b.sum(0) ** 3).sum() + (tree['twice'].sum(1) ** 3).sum()

    loss = cached_step(Tower(model, split_batch(batch, 4)), loss_fn)
    parts = [expected(**piece) for piece in split_batch(batch, 4)]
    rebuilt = (
        {key: torch.cat([part[0][key] for part in parts]) for key in ('a', 'twice')},
        torch.cat([part[1] for part in parts]),
        torch.cat([part[2] for part in parts]),
    )
    want = loss_fn(rebuilt)
    want.backward()
    assert relative_error(loss, want) < 1e-12
    assert model.unused.weight.grad is None
    assert_same_step(gradients(model), gradients(expected))


def test_outputs_that_the_loss_ignores_and_outputs_without_gradient():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.ignored, self.cut = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(12, 4)

        def forward(self, x):
            return self.used(x), self.ignored(x), self.cut(x).detach()

    model, x = Partly(), torch.randn(8, 12)
    cached([model], [x], lambda z: (z[0] * z[2]).sum())
    assert model.used.weight.grad.abs().sum() > 0
    assert model.ignored.weight.grad is None
    assert model.cut.weight.grad is None


def test_a_frozen_tower_runs_once_and_without_graph():
    case = Case('clip', dropout=0.2)
    image, text = case.model.encoders
    image.requires_grad_(False)
    cached([image, text], case.batches[0], case.loss)
    assert (image.calls, text.calls) == (3, 6)
    assert all(parameter.grad is None for parameter in image.parameters())

    def freeze(case):
        case.model.encoders[0].requires_grad_(False)
        return case

    expected = train(freeze(Case('clip', dropout=0.2)), plain)
    assert_same_step(train(freeze(Case('clip', dropout=0.2)), cached), expected)


def test_kept_graphs_are_counted_over_trained_towers_only():
    case = Case('clip')
    image, text = case.model.encoders
    text.requires_grad_(False)
    cached([image, text], case.batches[0], case.loss, keep_graph=1)
    assert (image.calls, text.calls) == (3 + 2, 3)


def test_a_frozen_tower_in_a_module_that_holds_both():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = Encoder().requires_grad_(False), Encoder()

        def forward(self, image=None, text=None):
            return self.text(text) if image is None else self.image(image)

    model = Both()
    towers = [
        Tower(model, [{name: x} for x in torch.randn(10, 12).split(CHUNK)], part=part)
        for name, part in model.named_children()
    ]
    cached_step(towers, lambda a, b: ClipLoss()(a, b, 5.0), keep_graph=1)
    assert (model.image.calls, model.text.calls) == (3, 3 + 2)


@pytest.mark.parametrize('keep_graph', [0, 1, 4, 9])
def test_one_encoder_for_both_towers(keep_graph):
    """Weight sharing: between the towers, and between encoder and loss."""
    torch.manual_seed(0)
    model = Encoder(0.2).double()
    expected = copy.deepcopy(model)
    inputs = [torch.randn(10, 12, dtype=torch.float64) for _ in range(2)]
    for module, step in ((expected, plain), (model, lambda *a: cached(*a, keep_graph=keep_graph))):
        torch.manual_seed(1)

        def loss_fn(a, b, module=module):
            return ClipLoss()(a @ module.head.weight, b @ module.head.weight, 5.0)

        step([module, module], inputs, loss_fn)
    assert_same_step(gradients(model), gradients(expected))


def test_inputs_that_require_a_gradient_get_it():
    torch.manual_seed(0)
    model = Encoder().double().requires_grad_(False)
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    cached([model], [x], lambda z: (z.sum(0) ** 3).sum())
    want = torch.autograd.grad((model(x).sum(0) ** 3).sum(), x)[0]
    assert relative_error(x.grad, want) < 1e-12


def test_inputs_with_an_upstream_graph_are_refused():
    x = nn.Linear(12, 12)(torch.randn(8, 12))
    with pytest.raises(ValueError, match='upstream graph'):
        cached([Encoder()], [x], torch.Tensor.sum)


def test_gradient_hooks_see_the_parts_of_the_gradient():
    model, x = Encoder().double(), torch.randn(12, 12, dtype=torch.float64)
    parts = []
    model.head.weight.register_hook(lambda gradient: parts.append(gradient.clone()))
    cached([model], [x], lambda z: (z.sum(0) ** 3).sum())
    assert len(parts) == 3
    assert relative_error(sum(parts), model.head.weight.grad) < 1e-12


def test_gradients_accumulate_over_steps():
    case = Case('simclr')
    encoders = list(case.model.encoders)
    cached(encoders, case.batches[0], case.loss)
    once = {n: None if g is None else 2 * g for n, g in gradients(case.model).items()}
    cached(encoders, case.batches[0], case.loss)
    assert_same_step(gradients(case.model), once)


def test_with_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed(Encoder(0.3)).double()
    expected, x = copy.deepcopy(model), torch.randn(10, 12, dtype=torch.float64)
    for module, step in ((expected, plain), (model, cached)):
        torch.manual_seed(1)
        step([module], [x], lambda z: (z.sum(0) ** 3).sum())
    assert_same_step(gradients(model), gradients(expected))


def test_compiled_encoders():
    torch.manual_seed(0)
    model = Encoder(0.3).double()
    expected, x = copy.deepcopy(model), torch.randn(10, 12, dtype=torch.float64)
    compiled = torch.compile(model, backend='aot_eager')
    for module, step in ((expected, plain), (compiled, cached)):
        torch.manual_seed(1)
        step([module], [x], lambda z: (z.sum(0) ** 3).sum())
    assert_same_step(gradients(model), gradients(expected))


@pytest.mark.edge('grad_cache', 'exact', 'An error in the second pass: the model is as it was')
def test_an_error_in_the_second_pass_leaves_the_model_as_it_was():
    class Fails(Encoder):
        def forward(self, x):
            if torch.is_grad_enabled():
                raise MemoryError
            return super().forward(x)

    model = Fails(norm=nn.BatchNorm1d(16))
    torch.manual_seed(0)
    with pytest.raises(MemoryError):
        cached([model], [torch.randn(8, 12)], lambda z: F.softplus(z).sum())
    assert model.layers[1].track_running_stats


@pytest.mark.parametrize('keep_graph', [0, 2])
def test_instancenorm_counts_every_slice_once(keep_graph):
    body = [nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(16, 3)).double()
    expected, x = copy.deepcopy(model), torch.randn(7, 1, 4, 4, dtype=torch.float64)
    slices = split_batch(x, 3)
    torch.cat([expected(piece) for piece in slices]).square().sum().backward()
    cached_step(Tower(model, slices), lambda z: z.square().sum(), keep_graph=keep_graph)
    assert_same_step(gradients(model), gradients(expected))
    assert_same_step(dict(model.named_buffers()), dict(expected.named_buffers()))


def test_complex_embeddings_get_their_gradient():
    class Spectrum(nn.Linear):
        def forward(self, x):
            z = super().forward(x)
            return {'z': z, 'spectrum': torch.fft.fft(z)}

    def loss(outputs):
        return outputs['z'].sum() + outputs['spectrum'].abs().square().mean()

    model, x = Spectrum(12, 4).double(), torch.randn(7, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    loss(expected(x)).backward()
    cached_step(Tower(model, split_batch(x, 3)), loss)
    assert_same_step(gradients(model), gradients(expected))


@pytest.mark.parametrize('keep_graph', [0, 1, 3])
def test_an_output_that_is_a_view_of_a_parameter_gets_its_gradient(keep_graph):
    # Made without a graph, such a view says all the same that it requires a gradient.
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(12, 4)
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return super().forward(x), self.scale.expand(len(x))

    def loss(outputs):
        z, scale = outputs
        return NTXentLoss(scale.mean())(z, z.roll(1, 0)) + z.square().mean()

    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(7, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    loss(expected(x)).backward()
    cached_step(Tower(model, split_batch(x, 3)), loss, keep_graph=keep_graph)
    assert_same_step(gradients(model), gradients(expected))
