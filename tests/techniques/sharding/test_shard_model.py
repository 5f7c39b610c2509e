"""What is sharded, what a rank holds, and what goes over the wire."""

from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from memengine.memory import saved_bytes
from memengine.memory.allocated import allocated_peak_bytes
from memengine.techniques.layers.weight_norm import WeightNormLinear, shared_weights
from memengine.techniques.sharding.clipping import (
    clip_each_grad_norm_,
    clip_grad_norm_,
    clip_grad_value_,
)
from memengine.techniques.sharding.materializing import on_meta
from memengine.techniques.sharding.shard_model import shard_model
from memengine.techniques.sharding.units import check_tied_weights, choose_units
from memengine.testing import assert_same_step, run_ranks
from tests.marks import NEEDS_SHARDING

pytestmark = NEEDS_SHARDING

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(self.inner(x).tanh())


class Model(nn.Module):
    """Blocks, a scalar, a frozen layer and a weight-normed head."""

    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = WeightNormLinear(WIDTH, 8)

    def forward(self, x):
        return self.scale * self.head(self.frozen(self.blocks(x)))


def build(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def data(rank=0, world_size=1):
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)
    return rows.chunk(world_size)[rank]


def step(model, run, rows, slices=3, no_sync=nullcontext):
    """The gradient of the mean over rows, in slices."""
    pieces = rows.chunk(slices)
    with shared_weights([model]) as before_the_last:
        for number, piece in enumerate(pieces, start=1):
            if number == slices:
                before_the_last()
            with no_sync() if number < slices else nullcontext():
                (run(piece).square().mean(1).sum() / len(rows)).backward()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}


@pytest.fixture(scope='module')
def expected():
    model = build()
    step(model, model, data(), slices=1)
    return gradients(model)


# ------------------------------------------------------------------ which modules


def test_units_are_the_blocks_or_what_is_named():
    vit = timm.create_model('vit_tiny_patch16_224', depth=3, embed_dim=12, num_heads=2)
    blocks = [f'blocks.{number}' for number in range(3)]
    assert choose_units(vit) == blocks
    assert choose_units(vit, ['blocks.0', 'head']) == ['blocks.0', 'head']
    assert choose_units(vit, type(vit.blocks[0])) == blocks
    assert choose_units(vit, []) == []
    assert choose_units(nn.Linear(2, 2)) == []
    assert choose_units(vit, fine=True) == [
        f'{b}.{part}' for b in blocks for part in ('attn', 'mlp')
    ]
    with pytest.raises(ValueError, match="units: .* no module 'block.0'; did you mean 'blocks.0'"):
        choose_units(vit, 'block.0')
    with pytest.raises(ValueError, match='at least 1 parameter, got 0'):
        choose_units(vit, 0)


@pytest.mark.edge(
    'sharding',
    'exact',
    'A block that reads a child’s weight without calling it: it stays whole',
)
def test_blocks_that_use_their_childrens_weights_stay_whole():
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    assert choose_units(layers, fine=True) == ['layers.0', 'layers.1']
    listed = nn.Sequential(Listed(), Listed())
    assert choose_units(listed, fine=True) == ['0', '1']
    own = nn.Sequential(Own(), Own())
    assert choose_units(own, fine=True) == ['0', '1']


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


class Own(nn.Module):
    """Most of it is its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))
        self.outer = nn.Linear(8, 8)


def test_units_by_size_and_by_policies_of_fsdp1():
    model = build()
    linear = 4 * WIDTH * (WIDTH + 1)
    # The outer layers are smaller than that, but not all of them together.
    inner = [*(f'blocks.{number}.inner' for number in range(3)), 'blocks']
    assert choose_units(model, linear) == inner
    assert choose_units(model, linear + 1) == [f'blocks.{number}' for number in range(3)]
    policy = partial(size_based_auto_wrap_policy, min_num_params=linear)
    assert choose_units(model, policy) == inner
    assert choose_units(model, ModuleWrapPolicy({WeightNormLinear})) == ['head']


# ------------------------------------------------------------------ the same gradient


class Collectives(TorchDispatchMode):
    """Counts what goes over the wire, by the name of the operation."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == 'c10d':
            self.calls[func._opname.strip('_')] += 1
        return func(*args, **(kwargs or {}))


def _gradients(rank, world_size):
    results = {}
    ways = {
        **{
            free_after: dict(free_after=free_after)
            for free_after in ('forward', 'backward', 'step')
        },
        'reduced by each slice': dict(reduce_once=False),
        'offloaded': dict(offload=True),
        'offloaded, ahead': dict(offload=True, prefetch=True, reduce_once=True, units='blocks'),
        'not ahead': dict(prefetch=False),
        'head by itself': dict(units=['blocks', 'head']),
        'one unit': dict(units=[]),
        'copies': dict(replicas=world_size // 2 or 1),
        'small': dict(units=1000, free_after='step'),
    }
    for way, settings in ways.items():
        model = build()
        sharded = shard_model(model, **settings)
        with Collectives() as wire, sharded.gathered():
            step(model, sharded, data(rank, world_size), no_sync=sharded.no_sync)
        results[way] = gradients(model), wire.calls
    return results


@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_slices_on_ranks_give_the_gradient_of_one_process(world_size, expected):
    wrong = {**expected, 'scale': expected['scale'] / world_size}
    for results in run_ranks(world_size, _gradients):
        for actual, _ in results.values():
            assert_same_step(actual, expected)
            with pytest.raises(AssertionError, match='scale'):
                assert_same_step(actual, wrong)
    # three units in three slices, and the rest once
    calls = {way: calls for way, (_, calls) in results.items()}
    gathers = {way: c['allgather_base'] for way, c in calls.items()}
    reduces = {way: c['reduce_scatter_base'] for way, c in calls.items()}
    assert gathers['forward'] == 3 * 2 * 3 + 1
    assert gathers['backward'] == 3 * 3 + 1
    assert gathers['step'] == 3 + 1
    assert reduces['forward'] == reduces['backward'] == reduces['step'] == 3 + 1
    assert gathers['offloaded'] == 2 * gathers['forward'] - 1  # blocks are in two parts
    assert gathers['offloaded, ahead'] == gathers['not ahead'] == gathers['forward']
    assert reduces['offloaded, ahead'] == reduces['not ahead'] == 3 + 1
    assert reduces['reduced by each slice'] > 3 * 3 and reduces['offloaded'] > 3 * 6
    assert gathers['one unit'] == reduces['one unit'] == 1
    for way in ('forward', 'backward', 'step'):
        assert calls[way]['allreduce'] == 2  # of the scalar; which parameters were used


# ------------------------------------------------------------------ what a rank holds


def held_bytes(model, optimizer):
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


class GatheredBytes:
    """The most bytes of gathered parameters, and of them and their gradients, at any module's turn
    in forward and in backward."""

    def __init__(self, model):
        self.model, self.parameters, self.everything = model, 0, 0
        for module in model.modules():
            module.register_forward_hook(self.after_forward)

    def after_forward(self, module, args, output):
        self.look()
        output.register_hook(self.look)

    def look(self, *args):
        plain = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        nbytes = sum(p.untyped_storage().nbytes() for p in plain)
        self.parameters = max(self.parameters, nbytes)
        nbytes += sum(p.grad.nbytes for p in plain if p.grad is not None)
        self.everything = max(self.everything, nbytes)


def vit(width=WIDTH, depth=8, img_size=8):
    torch.manual_seed(0)
    return timm.create_model(
        'vit_tiny_patch16_224',
        img_size=img_size,
        patch_size=4,
        depth=depth,
        embed_dim=width,
        num_heads=2,
        num_classes=8,
    )


def _bytes(rank, world_size):
    results = {}
    for offload in (False, True):
        model = vit()
        images = torch.randn(2, 3, 8, 8)
        saved = saved_bytes(lambda m=model, x=images: m(x).sum(), model)
        sharded = shard_model(model, offload=offload, reduce_once=False)
        optimizer = torch.optim.AdamW(model.parameters())
        seen = GatheredBytes(model)
        with sharded.gathered():
            # what is gathered is the model's, and no activation
            assert saved_bytes(lambda s=sharded, x=images: s(x).sum(), model) == saved
            sharded(images).sum().backward()
            optimizer.step()
        results[offload] = held_bytes(model, optimizer), seen.parameters, seen.everything
    return results


@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_holds_its_share_and_one_unit(world_size):
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    total = held_bytes(model, optimizer)
    everything = size_of(model)
    units = {  # the largest, and what is in none
        False: (size_of(model.blocks[0]), everything - size_of(model.blocks)),
        True: (
            size_of(model.blocks[0].mlp),
            everything - sum(size_of(part) for b in model.blocks for part in (b.attn, b.mlp)),
        ),
    }
    for results in run_ranks(world_size, _bytes):
        for offload, (held, parameters, with_gradients) in results.items():
            assert total / world_size <= held <= 1.05 * total / world_size
            unit, rest = units[offload]
            assert parameters == unit + rest <= 2 * unit
            assert unit + rest < with_gradients <= 2 * (unit + rest)


def size_of(module):
    return sum(p.nbytes for p in module.parameters())


@pytest.mark.usefixtures('beside_a_gpu')
@pytest.mark.parametrize('world_size', [1, 2, 4])
def test_with_offload_a_step_holds_less_than_two_blocks_on_the_device(world_size):
    """All that is allocated in a step, the transport's buffers and activations too.

    The group sends nothing. Gradients are there from the step before, and so are no part of it.
    """
    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=world_size)
    try:
        wide = partial(vit, width=256, depth=3, img_size=4)
        peaks = {}
        for name, settings in {
            'plain': {},
            'offload': dict(offload=True),
            'blocks': dict(offload=True, units='blocks'),
            'ahead': dict(offload=True, units='blocks', prefetch=True),
        }.items():
            model = wide()
            sharded = shard_model(model, **settings)

            def step(sharded=sharded):
                with sharded.gathered():
                    sharded(torch.ones(1, 3, 4, 4)).sum().backward()

            step()
            peaks[name] = allocated_peak_bytes(step)
    finally:
        dist.destroy_process_group()
    model = wide()
    block, everything = size_of(model.blocks[0]), size_of(model)
    rest = everything - size_of(model.blocks)
    stays = 0 if hasattr(FSDPModule, 'set_custom_reduce_scatter') else block  # a reduction's buffer
    assert size_of(model.blocks[0].mlp) < peaks['offload'] < 1.5 * block + 0.25 * stays
    assert block < peaks['blocks'] <= 2 * (block + rest) + stays + 0.05 * block  # of activations
    for name in ('plain', 'ahead'):
        assert peaks[name] > 2.9 * block


# ------------------------------------------------------------------ clipping


def _clipped(rank, world_size):
    clips = {
        'norm': partial(clip_grad_norm_, max_norm=0.01),
        'norm 3': partial(clip_grad_norm_, max_norm=0.01, norm_type=3.0),
        'largest': partial(clip_grad_norm_, max_norm=0.01, norm_type=float('inf')),
        'each': partial(clip_each_grad_norm_, max_norm=0.002),
        'value': partial(clip_grad_value_, clip_value=1e-4),
    }
    results = {}
    for name, clip in clips.items():
        model = build()
        if world_size > 1:
            sharded = shard_model(model)
            with sharded.gathered():
                step(model, sharded, data(rank, world_size), slices=1)
        else:
            step(model, model, data(), slices=1)
        norm = clip(list(model.parameters()))
        assert not isinstance(norm, DTensor)
        results[name] = dict(gradients(model), total=norm)
    return results


def test_clipping_is_by_the_norm_of_the_whole_gradient():
    plain = _clipped(0, 1)
    unclipped = build()
    step(unclipped, unclipped, data(), slices=1)
    for results in run_ranks(2, _clipped):
        for name, expected in plain.items():
            assert_same_step(results[name], expected)
            with pytest.raises(AssertionError, match='blocks'):
                assert_same_step({**gradients(unclipped), 'total': expected['total']}, expected)


# ------------------------------------------------------------------ without values


class OwnTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(2, 4))


def _from_meta(rank, world_size):
    torch.manual_seed(rank)
    with on_meta():
        model = nn.Sequential(*(Block() for _ in range(3)), nn.BatchNorm1d(WIDTH))
        own = OwnTensor()
    sharded = shard_model(model)
    with sharded.gathered():
        sharded(torch.randn(4, WIDTH)).sum().backward()
    with pytest.raises(ValueError, match='1 tensors of OwnTensor .* token; pass init_fn'):
        shard_model(own)
    with on_meta():
        own = OwnTensor()
    shard_model(own, init_fn=lambda module: nn.init.constant_(module.token, 3.0))
    return {k: whole(v) for k, v in [*model.state_dict().items(), ('token', own.token.data)]}


def test_a_model_without_values_gets_them_unit_by_unit():
    first, second = run_ranks(2, _from_meta)
    torch.manual_seed(0)
    block = Block()
    assert torch.equal(first['0.inner.weight'], block.inner.weight)
    assert torch.equal(first['token'], torch.full((2, 4), 3.0))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) or name.startswith('3.running'), name


# ------------------------------------------------------------------ refusals


def _refused(rank, world_size):
    with pytest.raises(ValueError, match='replicas must divide .* replicas=3 for 2 ranks'):
        shard_model(build(), replicas=3)
    with pytest.raises(ValueError, match="free_after must be one of .*, got 'never'"):
        shard_model(build(), free_after='never')


class Tied(nn.Module):
    """A weight at both ends, and a block that is called twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.blocks = nn.ModuleList([block, block])


@pytest.mark.edge('sharding', 'refused', 'Units that part a tied weight')
@pytest.mark.parametrize(
    ('units', 'said'),
    [
        (['embed'], 'embed.weight and out.weight .* in embed and .* in no unit.* without embed$'),
        (['embed', 'out'], 'the one is in embed and the other in out.* without embed and out$'),
    ],
)
def test_units_that_part_a_tied_weight_are_refused(units, said):
    with pytest.raises(ValueError, match=f'^units: .*{said}'):
        check_tied_weights(Tied(), units)
    check_tied_weights(Tied(), ['blocks.0'])  # under either name


@pytest.mark.edge('sharding', 'refused', 'Units that overlap, and other settings that cannot be')
def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match='needs a process group.*torchrun'):
        shard_model(build())
    run_ranks(2, _refused)


class Branches(nn.Module):
    """What is positive goes through the one, the rest through the other."""

    def __init__(self):
        super().__init__()
        self.above, self.below = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        branch = self.above if x.sum() > 0 else self.below
        return branch(x)


def _branches(rank, world_size):
    sharded = shard_model(Branches())
    with sharded.gathered():
        sharded(torch.ones(2, 4)).sum().backward()  # the same on all ranks
        with sharded.no_sync():
            sharded(torch.full((2, 4), rank - 0.5)).sum().backward()
        sharded(torch.full((2, 4), 0.5 - rank)).sum().backward()  # both by now, on both
        sharded.model.zero_grad()
        loss = sharded(torch.full((2, 4), rank - 0.5)).sum()
        with pytest.raises(
            ValueError, match=r'above.bias \(4 parameters.* rank\(s\) 0, but has one'
        ):
            loss.backward()


@NEEDS_SHARDING
@pytest.mark.edge(
    'sharding', 'refused', 'A parameter that some of the ranks have not used in a step'
)
def test_a_parameter_that_some_ranks_have_not_used_is_refused():
    """``fully_shard`` would add the gradient of one branch to that of the other."""
    run_ranks(2, _branches, timeout_s=120)


def _branches_without_gloo(rank, world_size):
    sharded = shard_model(Branches())
    dist.get_backend_config = lambda: 'nccl'

    def step(sign):
        sharded.model.zero_grad()
        sharded(torch.full((2, 4), sign)).sum().backward()

    step(1.0)
    step(rank - 0.5)
    with pytest.raises(ValueError, match=r'above.bias \(4 parameters.* rank\(s\) 0, but has one'):
        step(1.0)


@NEEDS_SHARDING
def test_where_it_would_be_waited_for_it_is_refused_a_step_later():
    run_ranks(2, _branches_without_gloo, timeout_s=120)
