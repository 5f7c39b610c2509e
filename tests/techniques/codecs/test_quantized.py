"""Quantised tensors: unbiased, within a step, in the bytes promised, never silently wrong."""

import io
import math
import pickle

import pytest
import torch

from memengine.memory.allocated import allocated_peak_bytes
from memengine.techniques.codecs.grids import UniformGrid, computing_dtype
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.modules.private_random import (
    private_generator,
    restart_private_generators,
)

BITS = (1, 2, 4, 8)
DRAWS = 256


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    restart_private_generators()


def steps(values, bits, group_size=256):
    """The step of each element's group; for whole groups."""
    groups = values.reshape(-1, group_size).double()
    step = (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
    return step[:, None].expand_as(groups).reshape(values.shape)


def squared_z_scores(decode_once, values, bits):
    """Squared errors of the mean of many draws, in units of what an unbiased rounding leaves."""
    step = steps(values, bits)
    mean = sum(decode_once().double() for _ in range(DRAWS)) / DRAWS
    low = values.reshape(-1, 256).double().amin(1)[:, None].expand(-1, 256).reshape(values.shape)
    fraction = ((values.double() - low) / step).frac()
    between = (fraction > 0.02) & (fraction < 0.98)
    errors = ((mean - values.double()) / step)[between]
    fraction = fraction[between]
    return errors**2 * DRAWS / (fraction * (1 - fraction))


@pytest.mark.parametrize('bits', BITS)
def test_rounding_is_unbiased(bits):
    values = torch.randn(2048)
    quantizer = Quantizer(bits)
    scores = squared_z_scores(lambda: quantizer(values).decode(), values, bits)
    assert 0.8 < scores.mean() < 1.2
    assert scores.max() < 5.5**2


@pytest.mark.parametrize('bits', BITS)
def test_biased_roundings_fail_that_test(bits):
    values = torch.randn(2048)
    nearest = Quantizer(bits, stochastic=False)
    assert squared_z_scores(lambda: nearest(values).decode(), values, bits).mean() > 20
    quantizer = Quantizer(bits)
    shift = 0.05 * steps(values, bits)  # a twentieth of a step
    shifted = squared_z_scores(lambda: quantizer(values).decode() + shift, values, bits)
    assert shifted.mean() > 2


def test_errors_of_neighbours_are_independent():
    values = torch.linspace(0, 1, 256).repeat(8)
    errors = torch.stack([Quantizer(1)(values).decode() - values for _ in range(DRAWS)])
    deviations = values.mul(1 - values).sqrt()
    inner = (deviations > 0.1).nonzero()[:, 0]
    z = (errors[:, inner] / deviations[inner]).double()
    for lag in (1, 7, 64, inner.numel() // 8):
        correlation = (z[:, lag:] * z[:, :-lag]).mean() * math.sqrt(z[:, lag:].numel())
        assert abs(correlation) < 5


@pytest.mark.parametrize('stochastic', [True, False])
@pytest.mark.parametrize('bits', BITS)
@pytest.mark.parametrize('offset', [0.0, 100.0])
def test_error_is_below_a_step(bits, stochastic, offset):
    values = (
        torch.randn(64, 256, dtype=torch.float64) * 10 ** torch.linspace(-5, 5, 64)[:, None]
    ).add_(offset)
    decoded = Quantizer(bits, stochastic=stochastic)(values).decode()
    errors = ((decoded - values).abs() / steps(values, bits)).max()
    assert errors <= (1 if stochastic else 0.5) + 1e-6


@pytest.mark.parametrize('stochastic', [True, False])
@pytest.mark.parametrize('bits', BITS)
@pytest.mark.parametrize('in_last_place', [False, True])
def test_error_by_channel_is_below_a_step_of_its_range(bits, stochastic, in_last_place):
    values = torch.randn(6, 50, 3, 5, dtype=torch.float64)
    values *= 10 ** torch.linspace(-5, 5, 50)[:, None, None]
    values[:, 7] = 0.1
    if in_last_place:
        values = values.to(memory_format=torch.channels_last)
    code = Quantizer(bits, 64, stochastic, by_channel=True)(values)
    assert code.nbytes == math.ceil(values.numel() * bits / 8) + 16 * (-(-4500 // 64) + 50)
    decoded = code.decode()
    assert decoded.stride() == values.stride()
    spans = values.amax((0, 2, 3), keepdim=True) - values.amin((0, 2, 3), keepdim=True)
    errors = (decoded - values).abs() - spans * 1e-12
    assert (errors <= spans / (2**bits - 1) * (1 if stochastic else 0.5)).all()
    assert torch.equal(decoded[:, 7], values[:, 7])


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('in_last_place', [False, True])
def test_a_range_without_a_reciprocal_leaves_its_neighbours_alone(dtype, in_last_place):
    values = torch.randn(4, 6, 3, 5, dtype=dtype)
    values[:, 2] *= torch.finfo(dtype).tiny / 64  # as weight decay leaves channels that are dead
    if in_last_place:
        values = values.to(memory_format=torch.channels_last)
    decoded = Quantizer(8, by_channel=True)(values).decode()
    assert (decoded[:, 2] - values[:, 2]).abs().max() < torch.finfo(dtype).tiny
    assert (decoded - values).abs().max() < 0.05


@pytest.mark.parametrize('bits', BITS)
def test_rounding_by_channel_is_unbiased(bits):
    values = torch.randn(8, 256) * torch.logspace(-3, 3, 256)
    quantizer = Quantizer(bits, by_channel=True)
    mean = torch.stack([quantizer(values).decode().double() for _ in range(DRAWS)]).mean(0)
    steps_ = (values.amax(0) - values.amin(0)).double() / (2**bits - 1)
    scores = (mean - values) / steps_ * DRAWS**0.5  # of at most half a step's deviation
    assert scores.square().mean() < 0.25 * 1.2
    assert abs(scores.mean()) * scores.numel() ** 0.5 < 5


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_adds_its_own_rounding_and_no_more(dtype):
    values = torch.randn(16, 256).to(dtype)
    decoded = Quantizer(8)(values).decode()
    assert decoded.dtype == dtype
    allowed = (
        steps(values, 8) + values.double().abs().amax(1, keepdim=True) * torch.finfo(dtype).eps
    )
    assert ((decoded - values).double().abs() <= allowed).all()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('numel', [0, 1, 257, 2**18 + 300])
@pytest.mark.parametrize('bits', BITS)
def test_bytes_exactly(bits, numel, dtype):
    code = Quantizer(bits)(torch.randn(numel).to(dtype))
    assert code.packed.nbytes == math.ceil(numel * bits / 8)
    assert code.extremes.nbytes == 2 * math.ceil(numel / 256) * dtype.itemsize
    assert code.packed.untyped_storage().nbytes() == code.packed.nbytes
    assert code.decode().shape == (numel,)


@pytest.mark.parametrize(('bits', 'share'), [(8, 0.27), (4, 0.14), (2, 0.08), (1, 0.05)])
def test_share_of_float32(bits, share):
    values = torch.randn(197, 192)
    code = Quantizer(bits)(values)
    assert code.packed.nbytes + code.extremes.nbytes <= share * values.nbytes


IMAGE = torch.arange(2 * 3 * 16 * 5, dtype=torch.float32).view(2, 3, 16, 5)


@pytest.mark.parametrize(
    'values',
    [
        IMAGE,
        IMAGE.to(memory_format=torch.channels_last),
        IMAGE.transpose(1, 3),
        IMAGE[1:],
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.empty(4, 0).t(),
        torch.randn(5, 1, 7).expand(5, 4, 7),
        torch.randn(()).expand(3, 2),
        torch.randn(3, 1).expand(3, 0),
    ],
)
def test_shape_and_strides_come_back(values):
    code = Quantizer(8)(values)
    decoded = code.decode()
    assert decoded.shape == values.shape
    assert decoded.stride() == values.stride()
    assert torch.allclose(decoded, values, atol=480 / 255)
    assert code.packed.numel() <= values.numel()


@pytest.mark.parametrize('values', [IMAGE[..., ::2], IMAGE[:, 1:], IMAGE.flatten().unfold(0, 9, 4)])
def test_tensors_with_gaps_or_overlaps_come_back_dense(values):
    decoded = Quantizer(8)(values).decode()
    assert decoded.stride() == values.clone().stride()
    assert torch.allclose(decoded, values, atol=480 / 255)


def test_groups_follow_memory():
    values = torch.randn(8, 256, 4, 4).to(memory_format=torch.channels_last)
    values[:, 0] = 1000  # would widen one group of each image, were groups in logical order
    widened = Quantizer(8)(values)
    assert (widened.extremes[1] == 1000).all()


def test_constant_groups_and_minima_are_exact():
    constants = torch.tensor([0.0, -0.1, 1e-45, 3.4e38, -3e38, 1 / 3]).repeat_interleave(256)
    for bits in BITS:
        assert torch.equal(Quantizer(bits)(constants).decode(), constants)
    positive = torch.randn(100, 256).relu()
    decoded = Quantizer(2)(positive).decode()
    assert (decoded[positive == 0] == 0).all()


@pytest.mark.parametrize('bits', BITS)
@pytest.mark.parametrize('poison', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.float64])
def test_nan_and_infinity_stay_visible_in_their_group_alone(bits, poison, dtype):
    clean = torch.randn(4 * 256).to(dtype)
    poisoned = clean.clone()
    poisoned[300] = poison
    decoded = Quantizer(bits)(poisoned).decode()
    assert not decoded[256:512].isfinite().any()
    rest = torch.arange(1024).div(256, rounding_mode='floor') != 1
    error = (decoded - clean)[rest].double().abs()
    assert (error <= steps(clean, bits)[rest] * 1.01 + 1e-3).all()  # neighbours' bits are untouched


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('bits', BITS)
def test_huge_and_tiny_ranges(bits, dtype):
    largest = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal
    for low, high in [
        (-largest, largest),
        (0, largest),
        (largest / 3, largest),
        (0, tiny),
        (-tiny, 0),
    ]:
        values = torch.linspace(0, 1, 256, dtype=torch.float64)
        values = (values * high + (1 - values) * low).to(dtype)
        decoded = Quantizer(bits)(values).decode()
        assert decoded.isfinite().all()
        step = high / (2**bits - 1) - low / (2**bits - 1)
        step = max(step, 1 / torch.finfo(computing_dtype(dtype)).max)  # below it there are none
        step += max(abs(low), abs(high)) * torch.finfo(dtype).eps
        errors = decoded.double() / 4 - values.double() / 4
        assert errors.abs().max() <= step / 4 * 1.01


def test_top_level_never_spills():
    generator = private_generator(torch.device('cpu'))
    lows = torch.randn(20000, 1)
    highs = lows + torch.rand(20000, 1) * 10 ** torch.linspace(-9, 9, 20000)[:, None]
    for bits in BITS:
        grid = UniformGrid.between(torch.stack([lows, highs]), bits)
        assert (grid.levels(lows, generator) == 0).all()
        top = grid.levels(highs, generator)
        assert (top[highs > lows] >= 2**bits - 2).all()


@pytest.mark.parametrize('dtype', [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match='floating-point'):
        Quantizer()(torch.ones(3).to(dtype))


@pytest.mark.parametrize(
    'settings', [dict(bits=3), dict(bits=32), dict(group_size=0), dict(group_size=12)]
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Quantizer(**settings)


def test_global_random_state_is_untouched():
    before = torch.get_rng_state()
    Quantizer(4)(torch.randn(1000, generator=torch.Generator().manual_seed(1))).decode()
    assert torch.equal(torch.get_rng_state(), before)


def test_seed_decides_and_draws_differ():
    values = torch.randn(1000)

    def draw(seed):
        torch.manual_seed(seed)
        restart_private_generators()
        return Quantizer(2)(values).packed

    first = draw(1)
    assert torch.equal(draw(1), first)
    assert not torch.equal(draw(2), first)
    assert not torch.equal(Quantizer(2)(values).packed, Quantizer(2)(values).packed)


def test_code_is_apart_from_the_tensor_and_from_what_it_decoded():
    values = torch.randn(300, requires_grad=True)
    code = Quantizer(8)(values)
    first = code.decode()
    assert not first.requires_grad
    expected = first.clone()
    first.zero_()
    with torch.no_grad():
        values.zero_()
    assert torch.equal(code.decode(), expected)


def test_pickle():
    values = torch.randn(300)
    quantizer = pickle.loads(pickle.dumps(Quantizer(4, 64, stochastic=False)))
    assert quantizer == Quantizer(4, 64, stochastic=False)
    code = quantizer(values)
    buffer = io.BytesIO()
    pickle.dump(code, buffer)
    assert torch.equal(pickle.loads(buffer.getvalue()).decode(), code.decode())


@pytest.mark.parametrize('bits', BITS)
def test_blocks_of_a_large_tensor_take_little_memory_and_each_has_its_own_ranges(bits):
    values = torch.randn(2**20 + 300) * torch.arange(2**20 + 300)  # in 8 bits ends in a part alone
    codes = []
    peak = allocated_peak_bytes(lambda: codes.append(Quantizer(bits)(values)))
    (code,) = codes
    assert peak <= code.packed.nbytes + code.extremes.nbytes + 1.5 * 2**20
    padded = torch.cat([values, values[-1:].expand(-values.numel() % 256)])
    step = steps(padded, bits)[: values.numel()]
    assert ((code.decode() - values).abs() <= step * (1 + 1e-5) + 1).all()
