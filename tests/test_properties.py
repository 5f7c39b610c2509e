"""What holds whatever is given: losses, slices, codes of tensors, the check of configs."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memengine.engine.config.check import ConfigError, check_config
from memengine.losses.clip import ClipLoss
from memengine.losses.dino import DINOLoss
from memengine.losses.koleo import koleo_loss
from memengine.losses.ntxent import NTXentLoss
from memengine.losses.selfcon import ConLoss
from memengine.losses.siglip import SigLipLoss
from memengine.losses.supcon import SupConLoss
from memengine.techniques.codecs.bit_packing import PACKED_BITS, pack_bits, unpack_bits
from memengine.techniques.codecs.lossless import narrow_ints, two_valued
from memengine.techniques.codecs.memory_order import in_memory_order
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.running_range import RunningRangeQuantizer
from memengine.techniques.slices.multi_crop import plan_slices
from memengine.techniques.slices.slicing import join_slices, slice_views, split_batch
from memengine.testing import relative_error
from tests.engine.config.mutations import CONFIGS, nodes, put, shipped

# The same examples on each run, so that CI says of a change what the change does.
same_examples = settings(derandomize=True, deadline=None, max_examples=25, database=None)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 9)


def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def loss_and_gradients(loss, inputs, *more):
    inputs = [one.clone().requires_grad_() for one in inputs]
    value = loss(*inputs, *more)
    return [value, *torch.autograd.grad(value, inputs)]


LOSSES = {
    'NTXent': lambda tile, a, b: loss_and_gradients(NTXentLoss(0.2, tile), [a, b]),
    'SupCon': lambda tile, a, b: loss_and_gradients(
        SupConLoss(0.2, tile_size=tile), [torch.stack([a, b], 1)], torch.arange(len(a)) // 2
    ),
    'SelfCon': lambda tile, a, b: loss_and_gradients(
        ConLoss(0.2, tile_size=tile), [torch.stack([a, b, a * b], 1)], torch.arange(len(a)) // 2
    ),
    'CLIP': lambda tile, a, b: loss_and_gradients(ClipLoss(tile), [a, b], torch.tensor(3.0)),
    'SigLIP': lambda tile, a, b: loss_and_gradients(
        SigLipLoss(tile), [a, b], torch.tensor(3.0), torch.tensor(-1.0)
    ),
}


@pytest.mark.parametrize('name', LOSSES)
@same_examples
@given(seed=seeds, batch_size=st.integers(2, 9), dim=sizes, tile_size=st.integers(1, 12))
def test_tiles_of_any_size_give_the_loss_and_its_gradients(name, seed, batch_size, dim, tile_size):
    a, b = drawn(seed, 2, batch_size, dim)
    for whole, tiled in zip(LOSSES[name](None, a, b), LOSSES[name](tile_size, a, b), strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-9, atol=1e-12)


@same_examples
@given(seed=seeds, batch_size=st.integers(2, 9), order=st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_change_a_loss(seed, batch_size, order):
    a, b = drawn(seed, 2, batch_size, 5)
    rows = list(range(batch_size))
    order.shuffle(rows)
    for loss in (NTXentLoss(0.2), SupConLoss(0.2)):
        given_order, other = (
            loss(x, y) if isinstance(loss, NTXentLoss) else loss(torch.stack([x, y], 1))
            for x, y in ((a, b), (a[rows], b[rows]))
        )
        assert relative_error(other, given_order) <= 1e-12


@same_examples
@given(seed=seeds, batch_size=st.integers(2, 9), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_koleo_asks_for_directions_and_for_no_order(seed, batch_size, scale):
    features = drawn(seed, batch_size, 4)
    want = koleo_loss(features)
    torch.testing.assert_close(koleo_loss(features.flip(0) * scale), want, rtol=1e-9, atol=1e-12)


crop_sizes = st.lists(st.sampled_from([4, 6, 9]), min_size=2, max_size=6)


@same_examples
@given(
    seed=seeds,
    crops=crop_sizes,
    batch_size=st.integers(1, 6),
    size=st.floats(1, 7, allow_nan=False),
)
def test_slices_of_crops_are_all_of_the_batch_and_of_its_loss(seed, crops, batch_size, size):
    planned = plan_slices([(side, side) for side in crops], batch_size, size)
    places = [(v, b) for piece in planned for v in piece.crops for b in piece.samples]
    assert sorted(places) == [(v, b) for v in range(len(crops)) for b in range(batch_size)]
    for piece in planned:
        (side,) = {crops[v] for v in piece.crops}
        pixels = len(piece.crops) * len(piece.samples) * side**2
        assert pixels <= size * max(crops) ** 2
    loss = DINOLoss(5, len(crops), 0.04, 0.04, 0, 1).double()
    targets = loss.targets(drawn(seed + 1, 2 * batch_size, 5), 0)  # [2, B, K]
    logits = drawn(seed, len(crops), batch_size, 5)
    sums = [
        loss.crop_loss(
            logits[piece.crops.start : piece.crops.stop, piece.samples.start : piece.samples.stop],
            piece.targets(targets),
        )
        for piece in planned
    ]
    whole = loss.batch_loss(logits.flatten(0, 1), targets)
    torch.testing.assert_close(sum(sums) / batch_size, whole, rtol=1e-9, atol=1e-12)


@same_examples
@given(seed=seeds, views=st.integers(1, 3), batch_size=sizes, size=sizes)
def test_slices_of_views_are_the_rows_of_all_views(seed, views, batch_size, size):
    inputs = list(drawn(seed, views, batch_size, 2))
    samples = {'label': torch.arange(batch_size), 'name': [str(n) for n in range(batch_size)]}
    cut = slice_views(inputs, samples, size)
    assert all(len(piece.rows) <= size and piece.total == views * batch_size for piece in cut)
    assert torch.equal(
        torch.cat([part for piece in cut for part in piece.inputs]), torch.cat(inputs)
    )
    labels = [label for piece in cut for label in piece.data_samples['label'].tolist()]
    assert labels == list(range(batch_size)) * views
    assert [name for piece in cut for name in piece.data_samples['name']] == [*map(str, labels)]


@same_examples
@given(seed=seeds, samples=sizes, size=sizes, names=st.sets(st.sampled_from('abc')))
def test_a_batch_that_is_cut_and_joined_is_the_batch(seed, samples, size, names):
    batch = {name: [drawn(seed, samples, 2), None] for name in ['x', *sorted(names)]}
    slices = split_batch(batch, size)
    assert all(len(one['x'][0]) <= size for one in slices)
    joined = join_slices(slices)
    assert joined.keys() == batch.keys()
    assert all(torch.equal(joined[name][0], batch[name][0]) for name in batch)


@same_examples
@given(seed=seeds, numel=st.integers(0, 40), bits=st.sampled_from(PACKED_BITS))
def test_packed_bits_come_back(seed, numel, bits):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(2**bits, (numel,), dtype=torch.uint8, generator=generator)
    assert torch.equal(unpack_bits(pack_bits(values, bits), bits, numel), values)


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def strided(seed, shape, order):
    """A tensor with its dimensions in any order in memory."""
    dims = list(range(len(shape)))
    order.shuffle(dims)
    return drawn(seed, *shape).permute(dims)


@same_examples
@given(seed=seeds, shape=shapes, order=st.randoms(use_true_random=False))
def test_lossless_codes_come_back_bit_for_bit_with_their_strides(seed, shape, order):
    tensor = strided(seed, shape, order)
    flat, way_back = in_memory_order(tensor)
    codes = [
        (tensor, way_back.shaped(flat)),
        *(
            (held, code.decode())
            for held, code in (
                ((tensor > 0).double(), two_valued((tensor > 0).double())),
                ((tensor * 100).long(), narrow_ints((tensor * 100).long())),
            )
            if code is not None
        ),
    ]
    for held, decoded in codes:
        assert torch.equal(decoded, held)
        assert decoded.stride() == held.stride() and decoded.dtype == held.dtype


@same_examples
@given(
    seed=seeds,
    shape=shapes,
    order=st.randoms(use_true_random=False),
    bits=st.sampled_from(PACKED_BITS),
    scale=st.sampled_from([1e-20, 1.0, 1e20]),
)
def test_quantised_values_are_within_a_step(seed, shape, order, bits, scale):
    tensor = strided(seed, shape, order) * scale
    decoded = Quantizer(bits, group_size=8)(tensor).decode()
    assert decoded.shape == tensor.shape
    if tensor.numel():
        step = (tensor.max() - tensor.min()) / (2**bits - 1)
        assert (decoded - tensor).abs().max() <= step * (1 + 1e-6)


@same_examples
@given(seed=seeds, groups=st.integers(1, 4), numel=st.integers(1, 9), steps=st.integers(1, 3))
def test_running_ranges_decode_within_a_step_of_what_they_clip(seed, groups, numel, steps):
    codec = RunningRangeQuantizer()
    for number in range(steps):
        tensor = drawn(seed + number, 2, groups, numel)
        decoded = codec(tensor).decode()
    low, high = codec.bounds[..., None]  # [G, 1]
    step = (high - low) / 255
    assert ((decoded - tensor.clamp(low, high)).abs() <= step * (1 + 1e-6)).all()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@settings(same_examples, max_examples=6)
@given(name=st.sampled_from(CONFIGS), place=st.integers(0, 10**6), value=plain)
def test_a_config_with_anything_anywhere_is_checked_or_refused(name, place, value):
    config = copy.deepcopy(shipped(name))
    paths = [path for path, _ in nodes(config)]
    put(config, paths[place % len(paths)], value)
    try:
        check_config(config)
    except ConfigError:
        return


@settings(same_examples, max_examples=6)
@given(name=st.sampled_from(CONFIGS), place=st.integers(0, 10**6), word=st.text('qz', min_size=3))
def test_an_unknown_key_at_the_top_or_in_a_type_is_named(name, place, word):
    config = copy.deepcopy(shipped(name))
    inside = [path for path, value in nodes(config) if path.endswith('.type')]
    above = ['', *(path.removesuffix('type') for path in inside if 'optim_wrapper' in path)]
    put(config, f'{above[place % len(above)]}{word}', 1)
    with pytest.raises(ConfigError, match=word):
        check_config(config)


@pytest.mark.parametrize('name', CONFIGS)
def test_the_check_leaves_a_config_as_it_is(name):
    config = copy.deepcopy(shipped(name))
    check_config(config)
    assert config.to_dict() == shipped(name).to_dict()
