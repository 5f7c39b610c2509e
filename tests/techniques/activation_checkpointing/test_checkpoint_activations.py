"""Activation checkpointing: the same step, fewer bytes, a known price, on any kind of module."""

import copy
import functools
import itertools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import timm
import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from memengine._torch_private.ops import CHECKPOINT_HEEDS_HOOKS
from memengine.memory import SavedBytes
from memengine.techniques.activation_checkpointing import checkpoint_activations as planning
from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    checkpoint_activations,
)
from memengine.testing import assert_same_step, saved_bytes

WAYS = {
    'all': dict(),
    'every second': dict(every=2),
    'selective': dict(keep=['matmuls', 'attention']),
    'by op': dict(keep=['aten.gelu', torch.ops.aten.relu, 'aten.convolution']),
    'budget 0.6': dict(budget=0.6),
    'budget 0.3': dict(budget=0.3),
    'budget 0': dict(budget=0),
    'budget 1': dict(budget=1),
}
meter_sees_kept = pytest.mark.skipif(
    not CHECKPOINT_HEEDS_HOOKS,
    reason='in this torch, kept tensors bypass the hooks that count them',
)


def vit(depth=3, **kwargs):
    return timm.create_model(
        'vit_tiny_patch16_224',
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=depth,
        num_heads=3,
        num_classes=4,
        **kwargs,
    )


def dropping_vit():
    return vit(drop_path_rate=0.3, proj_drop_rate=0.2, attn_drop_rate=0.2)


def resnet():
    """With drop-path, BatchNorm and in-place ReLUs."""
    return ResNet(
        BasicBlock, (2, 1, 1, 1), 4, channels=(8, 16, 16, 16), stem_width=8, drop_path_rate=0.2
    )


class Odd(nn.Module):
    """Keyword arguments, nested inputs and outputs, dropout of Python's, BatchNorm, GELU."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x, *, pair, scale=1.0, log):
        log.append(scale)
        if random.random() < 0.5:
            scale = 2 * scale
        hidden = F.gelu(self.one(x)) * scale + pair['a'][0]
        return {'x': self.norm(hidden), 'rest': [self.two(hidden), len(log)]}


class OddNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3 * 32 * 32, 8)
        self.layers = nn.ModuleList(Odd() for _ in range(3))

    def forward(self, images):
        x, log = self.stem(images.flatten(1)), []
        pair = {'a': (x.sin(), None)}
        for layer in self.layers:
            out = layer(x, pair=pair, scale=0.5, log=log)
            x = out['x'] + out['rest'][0]
        assert len(log) == 3  # what a module writes into the caller's list arrives, once
        return x[:, :4]


MODELS = {'vit': dropping_vit, 'resnet': resnet, 'odd': OddNet}


def train(model, steps=3):
    """Some steps of AdamW; losses, gradients, parameters, buffers and random state at the end."""
    torch.manual_seed(1)
    random.seed(1)
    images = torch.randn(steps, 4, 3, 32, 32, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    result = {}
    for index, batch in enumerate(images):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        result[f'loss {index}'] = loss.detach()
    result |= {f'gradient of {name}': p.grad for name, p in model.named_parameters()}
    result |= {name: value.clone() for name, value in model.state_dict().items()}
    return {**result, 'next': torch.rand(1), 'next of Python': torch.tensor(random.random())}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


@functools.cache
def trained(name):
    """What the plain model gives."""
    return train(make(name))


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('way', WAYS)
def test_same_steps(name, way):
    options = WAYS[way]
    model = make(name)
    handle = checkpoint_activations(model, 'blocks' if name != 'odd' else 'Odd', **options)
    assert_same_step(train(model), trained(name))
    assert handle.unused() == {}


def test_same_steps_in_eval_mode_and_with_frozen_parts():
    def prepared():
        model = make('resnet').eval()
        model.layer1.requires_grad_(False)
        model.conv1.requires_grad_(False)
        model.bn1.requires_grad_(False)
        return model

    model = prepared()
    handle = checkpoint_activations(model, 'blocks', keep='matmuls')
    assert_same_step(train(model), train(prepared()))
    reason = 'nothing in it needs a gradient'
    assert handle.unused() == {'layer1.0': reason, 'layer1.1': reason}


@pytest.mark.parametrize('options', [dict(), dict(keep='matmuls')], ids=['all', 'selective'])
def test_one_recipe_that_forgets_statistics_fails_this_test(options):
    """The control: torch's checkpoint by itself counts BatchNorm's statistics twice."""
    expected = trained('resnet')
    model = make('resnet')
    checkpoint_activations(model, 'blocks', **options)
    assert_same_step(train(model), expected)
    model = make('resnet')
    for layer in (model.layer1, model.layer2):
        own = layer.forward
        layer.forward = lambda x, own=own: torch.utils.checkpoint.checkpoint(
            own, x, use_reentrant=False
        )
    with pytest.raises(AssertionError, match='running_mean'):
        assert_same_step(train(model), expected)


def test_a_first_layer_gets_its_gradient():
    model, plain = make('vit'), make('vit')
    checkpoint_activations(model, 'patch_embed')
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for each in (model.eval(), plain.eval()):
        each(images).square().sum().backward()
    assert_same_step(
        {'w': model.patch_embed.proj.weight.grad}, {'w': plain.patch_embed.proj.weight.grad}
    )


# ------------------------------------------------------------------ bytes and price


def step_of(model, images):
    return lambda: model(images).square().sum().backward()


def price(model, images):
    attention = {  # on CPUs, which torch does not count before 2.15
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, value, *args, **kwargs: sdpa_flop_count(query, key, value)
        )
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as flops:
        step_of(model, images)()
    return flops.get_total_flops()


@functools.cache
def bytes_and_flops(plain=False, **options):
    """Bytes at the peak and FLOPs of a step."""
    torch.manual_seed(0)
    model, images = vit(depth=12), torch.randn(4, 3, 32, 32)
    if not plain:
        checkpoint_activations(model, **options)
        step_of(model, images)()  # what is kept is settled in the first step
    return saved_bytes(step_of(model, images), model, images), price(model, images)


def facts(**options):
    """Bytes at the peak and FLOPs of a step, as fractions of the plain step's."""
    pairs = zip(bytes_and_flops(**options), bytes_and_flops(plain=True), strict=True)
    share, price_of_plain = (checkpointed / plain for checkpointed, plain in pairs)
    return share, price_of_plain - 1


def test_all_blocks_checkpointed():
    share, extra = facts()
    assert share < 1 / 6
    assert 0.2 < extra < 1 / 3  # under one more forward, as the last product is not awaited


def test_every_second_block():
    share, extra = facts(every=2)
    half, whole = 0.5 * (1 + facts()[0]), facts()[1]
    assert share == pytest.approx(half, abs=0.06)
    assert extra == pytest.approx(whole / 2, rel=0.01)


def test_the_first_blocks_save_what_all_do_and_take_less():
    all_of_them, (share, extra) = facts(), facts(first=11)  # of twelve
    assert share < 1.1 * all_of_them[0]  # the last one's activations are used before any other's
    assert extra == pytest.approx(11 / 12 * all_of_them[1], rel=0.01)
    assert checkpoint_activations(vit(), every=2, first=1).names == ['blocks.0']


def test_each_block_runs_exactly_once_more():
    model, images = vit(), torch.randn(2, 3, 32, 32)
    calls = []
    model.blocks[1].norm1.register_forward_hook(lambda *_: calls.append(1))
    checkpoint_activations(model)
    for _ in range(2):
        step_of(model, images)()
    assert len(calls) == 4


@meter_sees_kept
def test_selective_keeps_every_product():
    share, extra = facts(keep=('matmuls', 'attention'))
    assert extra == 0
    assert share < 0.68


@meter_sees_kept
def test_attention_only():
    share, extra = facts(keep='attention')
    assert share < 0.21
    assert extra < facts()[1]


@meter_sees_kept
def test_a_budget_is_kept_and_costs_less_than_its_share():
    budgets = (0.8, 0.6, 0.4, 0.25)
    measured = [facts(budget=budget) for budget in budgets]
    whole_share, whole = facts()
    for budget, (share, extra) in zip(budgets, measured, strict=True):
        assert budget - 0.12 < share <= budget + 0.01  # it is used, too
        # The line from the plain step to everything checkpointed is what every k-th block gives.
        assert extra < whole * (1 - share) / (1 - whole_share)
    assert all(more[1] <= less[1] for more, less in pairwise(measured))
    assert facts(budget=1) == (1, 0)
    assert facts(budget=0) == (whole_share, whole)


# ------------------------------------------------------------------ corners


def test_names_state_copies_and_pickles():
    model, plain, images = vit().double(), vit().double(), torch.randn(2, 3, 32, 32).double()
    plain.load_state_dict(model.state_dict())
    checkpoint_activations(model, budget=0.5)
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]
    assert list(model.state_dict()) == list(plain.state_dict())
    step_of(model, images)()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.load_state_dict(plain.state_dict())
        other.zero_grad()
        assert other.blocks[0].forward.module is other.blocks[0]
        with SavedBytes(other, images) as saved:
            step_of(other, images)()
        assert saved.peak_bytes < 0.8 * saved_bytes(step_of(plain, images), plain, images)
        plain.zero_grad()
        step_of(plain, images)()
        gradients = [{k: p.grad for k, p in each.named_parameters()} for each in (other, plain)]
        assert_same_step(*gradients)


def test_undo():
    model, images = vit(), torch.randn(2, 3, 32, 32)
    before = saved_bytes(step_of(model, images), model)
    handle = checkpoint_activations(model)
    assert saved_bytes(step_of(model, images), model) < before
    with pytest.raises(ValueError, match=r'blocks\.0 is checkpointed already'):
        checkpoint_activations(model)
    handle.undo()
    assert all('forward' not in vars(module) for module in model.modules())
    assert saved_bytes(step_of(model, images), model) == before


def test_a_forward_that_was_wrapped_before_is_kept():
    model = nn.Sequential(nn.Linear(4, 4))
    own = model[0].forward
    model[0].forward = wrapped = lambda x: 2 * own(x)
    handle = checkpoint_activations(model, '0')
    x = torch.ones(1, 4)
    assert torch.equal(model(x), 2 * own(x))
    handle.undo()
    assert model[0].forward is wrapped


def test_nothing_is_repeated_without_gradient():
    model = vit()
    handle = checkpoint_activations(model, keep='matmuls')
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert set(handle.unused().values()) == {'nothing in it needs a gradient'}


def test_what_is_never_called_is_said():
    model = nn.ModuleDict({'used': nn.Linear(2, 2), 'unused': nn.Linear(2, 2)})
    handle = checkpoint_activations(model, ['used', 'unused'])
    model['used'](torch.ones(1, 2)).sum().backward()
    assert handle.unused() == {'unused': 'it is never called'}


def test_backward_twice():
    model, images = vit().double(), torch.randn(2, 3, 32, 32).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model)
    for each in (model, plain):
        loss = each(images).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    gradients = [{k: p.grad for k, p in each.named_parameters()} for each in (model, plain)]
    assert_same_step(*gradients)


class InPlace(nn.Module):
    """A product that is overwritten, and one that is not."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.two(self.one(x).relu_()).tanh()


def test_products_that_are_overwritten_are_not_kept():
    model, x = nn.Sequential(InPlace(), InPlace()).double(), torch.randn(4, 8).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, keep='matmuls')
    for each in (model, plain):
        each(x).sum().backward()
    assert_same_step(*({k: p.grad for k, p in m.named_parameters()} for m in (model, plain)))


class Attending(nn.Module):
    """Attention with dropout, then dropout again: what is kept must not shift what is drawn."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        x = F.dropout(self.out(x.transpose(1, 2).flatten(2)), 0.5)
        return torch.bernoulli(torch.full_like(x, 0.5)) * x


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Random numbers inside, with `keep`: they are drawn alike',
)
@pytest.mark.parametrize(
    'options', [dict(keep=['attention', 'matmuls', 'bernoulli']), dict(budget=0.8)]
)
def test_random_ops_are_drawn_again(options):
    model, x = nn.Sequential(Attending(), Attending()).double(), torch.randn(2, 5, 8).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, 'Attending', **options)
    for _ in range(2):
        for each in (model, plain):
            torch.manual_seed(0)
            each(x).square().sum().backward()
    assert_same_step(*({k: p.grad for k, p in m.named_parameters()} for m in (model, plain)))


@pytest.mark.parametrize('options', [dict(), dict(keep='matmuls'), dict(budget=0.5)])
def test_autocast_with_a_module_that_is_called_twice(options):
    model, x = vit(), torch.randn(2, 3, 32, 32)
    plain = copy.deepcopy(model)
    checkpoint_activations(model, **options)
    for each in (model, plain):
        with torch.autocast('cpu', torch.bfloat16):
            loss = each(x).sum() + each(x.flip(0)).square().sum()
        loss.float().backward()
    assert_same_step(*({k: p.grad for k, p in m.named_parameters()} for m in (model, plain)), 0.02)


class Changing(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.linear, self.inplace = nn.Linear(4, 4), inplace
        self.register_buffer('count', torch.zeros(()))

    def forward(self, x):
        if self.inplace:
            x.mul_(2)
        else:
            self.count += 1
        return self.linear(x).tanh()


@pytest.mark.edge(
    'activation_checkpointing',
    'refused',
    'A forward that writes into its inputs or a buffer',
)
@pytest.mark.parametrize(
    ('inplace', 'message'),
    [(True, '0 changes its input in place'), (False, 'count of 0 changes in its forward')],
)
def test_what_cannot_be_repeated_is_refused(inplace, message):
    model = nn.Sequential(Changing(inplace))
    checkpoint_activations(model, '0')
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 4))


class Caching(nn.Module):
    """Attends to what earlier calls have left in a cache, as language models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, cache):
        return sum(cache(self.linear(x))).tanh()


@pytest.mark.edge(
    'activation_checkpointing',
    'refused',
    '`keep` and `budget` with a model that fills a cache which nothing shows (a function’s): the '
    'error names `use_cache=False`',
)
@pytest.mark.parametrize('options', [dict(keep='matmuls'), dict(budget=0.5)])
def test_a_cache_that_a_measured_forward_would_fill_is_named(options):
    model, seen = Caching(), []
    checkpoint_activations(model, '', **options)

    def cache(x):
        seen.append(x)
        return seen

    with pytest.raises(ValueError, match='use_cache=False'):
        model(torch.ones(2, 4), cache).sum().backward()


@pytest.mark.parametrize('options', [dict(keep='matmuls'), dict(budget=0.5)])
def test_a_backward_inside_of_a_measured_forward_is_named(options):
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    model, x = Forces(), torch.ones(2, 4, requires_grad=True)
    handle = checkpoint_activations(model, '', **options)
    with pytest.raises(ValueError, match='a backward runs inside'):
        model(x)
    handle.undo()
    checkpoint_activations(model, '')  # which can repeat it
    model(x).square().sum().backward()
    assert model.energy[0].weight.grad is not None


@pytest.mark.edge(
    'activation_checkpointing',
    'refused',
    'An input that is written to after the module has run (`x += block(x)`), also where the plain '
    'step’s backward does not need it any more: torch’s own error',
)
@pytest.mark.parametrize('options', [{}, dict(keep='matmuls'), dict(budget=0.5)])
def test_an_input_that_is_written_to_afterwards_is_an_error(options):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Tanh())  # ReLU keeps what it gives
    checkpoint_activations(model, '', **options)
    x = torch.ones(2, 4, requires_grad=True) * 2
    x += model(x)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        x.sum().backward()


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(modules='block'), "did you mean 'blocks'"),
        (dict(keep='matmul_'), "did you mean .*'matmuls'"),
        (dict(keep='aten.gelu_gelu'), 'no op'),
        (dict(budget=1.5), 'fraction .* from 0 to 1, got 1.5'),
        (dict(budget=0.5, keep='matmuls'), 'give one of them'),
        (dict(every=0), 'every must be'),
        (dict(first=0), 'first is how many of 3 modules, got 0'),
        (dict(every=2, first=3), 'first is how many of 2 modules, got 3'),
        (dict(first=True), 'got True'),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        checkpoint_activations(vit(), **options)


@pytest.mark.parametrize(
    ('keep', 'named'),
    [
        ('aten.cumsum', r'aten\.cumsum'),
        (
            ['aten.cumsum', 'aten.sort', 'aten.cumprod', 'aten.topk'],
            r'aten\.cumprod, aten\.cumsum, aten\.sort and 1 more',
        ),
    ],
)
def test_ops_that_do_not_occur(keep, named):
    model = vit()
    checkpoint_activations(model, keep=keep)
    model(torch.randn(1, 3, 32, 32))  # measures all of them
    with pytest.raises(ValueError, match=rf'none of {named} computes .* there are aten\.\w+'):
        model(torch.randn(1, 3, 32, 32))


def test_ops_that_occur_in_some_of_the_modules():
    model = vit()
    checkpoint_activations(model, ['patch_embed', 'blocks'], keep='attention')
    for _ in range(2):
        step_of(model, torch.randn(1, 3, 32, 32))()


def in_thread(work):
    """Have another thread do something, to the end."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@pytest.mark.edge('activation_checkpointing', 'exact', 'Several threads that use one model')
@pytest.mark.parametrize('call', range(2))
def test_another_thread_measures_while_one_plans(monkeypatch, call):
    """Whichever moment of planning it is, both go on with plans of their own."""
    model, images = vit().double(), torch.randn(2, 3, 32, 32).double()
    plain, calls = copy.deepcopy(model), itertools.count()
    checkpoint_activations(model, budget=0.5)
    tokens = torch.randn(2, 5, model.embed_dim).double()
    model.blocks[0](tokens)  # measured
    real = planning.plan_by_budget

    def interrupted(*args):
        if next(calls) == call:
            in_thread(lambda: model.blocks[1](tokens))  # measures, too
        return real(*args)

    monkeypatch.setattr(planning, 'plan_by_budget', interrupted)
    model.blocks[0](tokens)
    model.blocks[1](tokens)
    assert next(calls) > call
    for each in (model, plain):
        step_of(each, images)()
    assert_same_step(*({k: p.grad for k, p in each.named_parameters()} for each in (model, plain)))


def test_threads_that_begin_together_are_not_told_of_ops_that_come_later():
    """One has measured the first module, which has none of them, when another comes to it."""
    model = nn.Sequential(nn.GELU(), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    checkpoint_activations(model, ['0', '1'], keep='matmuls')
    x = torch.ones(2, 4, requires_grad=True)
    hidden = model[0](x)
    in_thread(lambda: model(x))
    model[1](hidden).sum().backward()


@pytest.mark.parametrize('options', [dict(), dict(keep=['matmuls', 'attention']), dict(budget=0.5)])
def test_a_whole_model_under_compile(options):
    model, images = vit(depth=2).double(), torch.randn(2, 3, 32, 32).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, **options)
    compiled = torch.compile(model, backend='aot_eager')
    compiled(images).square().sum().backward()
    plain(images).square().sum().backward()
    assert_same_step(*({k: p.grad for k, p in m.named_parameters()} for m in (model, plain)))
