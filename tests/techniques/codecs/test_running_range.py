"""Running ranges: the average that Mesa defines, clipping, one state for each place."""

import math
import pickle

import pytest
import torch

from memengine.techniques.codecs.running_range import RunningRangeQuantizer
from memengine.techniques.modules.private_random import restart_private_generators


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    restart_private_generators()


def test_ranges_are_running_averages_for_each_head():
    quantizer = RunningRangeQuantizer(dim=1)
    expected = None
    for _ in range(4):
        values = torch.randn(3, 4, 5, 6) * torch.tensor([1.0, 10.0, 0.1, 3.0]).view(1, 4, 1, 1)
        quantizer(values)
        heads = values.transpose(0, 1).reshape(4, -1)
        seen = torch.stack([heads.amin(1), heads.amax(1)])
        expected = seen if expected is None else 0.9 * expected + 0.1 * seen
    torch.testing.assert_close(quantizer.bounds, expected)


def test_channels_in_the_last_dimension():
    values = torch.randn(2, 5, 4)
    last, second = RunningRangeQuantizer(dim=-1), RunningRangeQuantizer(dim=1)
    last(values)
    second(values.transpose(1, 2))
    assert torch.equal(last.bounds, second.bounds)


def test_what_is_in_range_is_within_a_step_and_the_rest_is_clipped():
    quantizer = RunningRangeQuantizer(dim=1)
    quantizer(torch.rand(4, 3, 50))  # about [0, 1]
    values = torch.randn(4, 3, 50) * 3
    decoded = quantizer(values).decode()
    low, high = quantizer.bounds[..., None]
    assert (values > high).any() and (values < low).any()
    step = (high - low) / 255
    assert ((decoded - values.clamp(low, high)).abs() <= step * 1.0001).all()


def test_the_mean_is_the_clipped_tensor():
    values = torch.linspace(0, 1, 64).view(1, 1, 64)
    quantizer = RunningRangeQuantizer(dim=1)
    quantizer(values)
    values = values * 2
    total = torch.zeros_like(values)
    for _ in range(400):
        quantizer.bounds = torch.tensor([[0.0], [1.0]])  # which this tensor moves to 1.1
        total += quantizer(values).decode()
    clipped, step = values.clamp(0, 1.1), 1.1 / 255
    torch.testing.assert_close(total / 400, clipped, atol=5 * step / 2 / math.sqrt(400), rtol=0)
    assert (total / 400 - values).abs().max() > 0.8  # biased where it clips


@pytest.mark.parametrize('poison', [math.nan, math.inf])
def test_what_is_not_finite_stays_visible_and_leaves_no_trace(poison):
    quantizer, untouched = RunningRangeQuantizer(dim=1), RunningRangeQuantizer(dim=1)
    clean = torch.randn(2, 3, 10)
    for _ in range(2):
        values = clean.clone()
        values[0, 1, 3] = poison
        decoded = quantizer(values).decode()
        assert not decoded[:, 1].isfinite().any()
        assert decoded[:, [0, 2]].isfinite().all()
        assert quantizer(clean).decode().isfinite().all()
        untouched(clean)
        assert torch.equal(quantizer.bounds[:, 1], untouched.bounds[:, 1])


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    'values',
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 4, 3, 5).transpose(1, 2),
        torch.randn(0, 3, 4),
    ],
)
def test_shape_strides_dtype_and_bytes(values, dtype):
    values = values.to(dtype)
    code = RunningRangeQuantizer(dim=1)(values)
    decoded = code.decode()
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (
        values.shape,
        values.stride(),
        dtype,
    )
    assert code.levels.nbytes == values.numel()
    if values.numel():
        spread = (values.amax() - values.amin()).double() / 255
        rounding = torch.finfo(dtype).eps * values.abs().amax().double()
        assert ((decoded.double() - values.double()).abs() <= spread * 1.1 + rounding).all()


def test_a_later_tensor_does_not_change_a_code():
    quantizer = RunningRangeQuantizer(dim=1)
    code = quantizer(torch.randn(2, 3, 10))
    before = code.decode()
    quantizer(torch.randn(2, 3, 10) * 100)
    assert torch.equal(code.decode(), before)


def test_state_goes_on_after_pickling():
    quantizer = RunningRangeQuantizer(dim=1)
    quantizer(torch.randn(2, 3, 10))
    again = pickle.loads(pickle.dumps(quantizer))
    values = torch.randn(2, 3, 10)
    again(values)
    quantizer(values)
    assert torch.equal(again.bounds, quantizer.bounds)


def test_wrong_uses_are_refused():
    with pytest.raises(ValueError, match='dim=1 is no dimension'):
        RunningRangeQuantizer(dim=1)(torch.ones(3))
    with pytest.raises(TypeError, match='floating-point'):
        RunningRangeQuantizer()(torch.ones(2, 3, dtype=torch.int64))
    quantizer = RunningRangeQuantizer(dim=1)
    quantizer(torch.ones(2, 3))
    with pytest.raises(ValueError, match='one instance for each place'):
        quantizer(torch.ones(2, 4))
