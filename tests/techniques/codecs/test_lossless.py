"""Codes that lose nothing: torch's own derivatives come out bit for bit the same."""

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from memengine.techniques.codecs.lossless import (
    between,
    bitmask,
    narrow_ints,
    positive_mask,
    shape_only,
    sign_mask,
    two_valued,
)

CORNERS = torch.tensor([-7.0, -3.0, -1.0, -0.0, 0.0, 1e-45, 0.5, 1.0, 3.0, 6.0, 7.0])
LAYOUTS = [
    torch.randn(2, 3, 4, 5),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(7, 9).t(),
    torch.randn(3, 1).expand(3, 5),
    torch.randn(()),
    torch.randn(0, 3),
]


def gradient(function, values, codec=None):
    """The input's gradient, with what is saved replaced by its code, if there is a codec."""
    values = values.clone().requires_grad_()
    coded = []

    def pack(tensor):
        coded.append(codec(tensor.detach()))
        return coded[-1]

    if codec is None:
        result = function(values)
    else:
        with saved_tensors_hooks(pack, lambda code: code.decode()):
            result = function(values)
        assert coded
    result.backward(torch.arange(1, result.numel() + 1).view(result.shape).to(result.dtype))
    return values.grad


def inputs(dtype):
    return torch.cat([CORNERS, torch.tensor([math.inf, -math.inf]), torch.randn(99)]).to(dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ('function', 'codec'),
    [
        (F.relu, positive_mask),
        (lambda x: F.leaky_relu(x, 0.1), sign_mask),
        (F.relu6, lambda x: between(x, 0, 6, inside=3, outside=6)),
        (F.hardtanh, lambda x: between(x, -1, 1, inside=0, outside=1)),
        (F.hardsigmoid, lambda x: between(x, -3, 3, inside=0, outside=3)),
    ],
)
def test_derivatives_from_one_bit_are_torchs_own(function, codec, dtype):
    values = inputs(dtype)
    assert torch.equal(gradient(function, values, codec), gradient(function, values))


@pytest.mark.parametrize(
    ('function', 'codec'),
    [
        (F.relu, positive_mask),
        (lambda x: F.leaky_relu(x, 0.1), sign_mask),
    ],
)
def test_nan_goes_the_way_it_goes_in_torch(function, codec):
    values = torch.tensor([1.0, math.nan, -1.0] * 40)
    assert torch.equal(gradient(function, values, codec), gradient(function, values))


def test_nan_is_within_any_bounds():
    # torch's own derivative of hardtanh takes it either way, by where in the tensor it is
    assert between(torch.tensor([math.nan]), -1, 1, inside=0.5, outside=1).decode() == 0.5


def test_a_wrong_code_gives_another_gradient():
    values = inputs(torch.float32)
    assert not torch.equal(
        gradient(F.relu, values, lambda x: bitmask(x, lambda e: e > 0.5)), gradient(F.relu, values)
    )


@pytest.mark.parametrize('values', LAYOUTS)
def test_bits_of_any_layout(values):
    code = positive_mask(values)
    decoded = code.decode()
    assert torch.equal(decoded, (values > 0).to(values.dtype))
    assert decoded.stride() == values.stride()
    assert code.packed.nbytes == math.ceil(code.order.numel / 8)
    mask = (values > 0).view(values.shape)
    assert torch.equal(bitmask(mask).decode(), mask)
    assert bitmask(mask).decode().dtype == torch.bool


def test_bitmask_of_numbers_needs_a_test():
    with pytest.raises(TypeError, match='booleans'):
        bitmask(torch.ones(3))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('numel', [1, 8, 1023, 5000])
def test_dropouts_noise_in_one_bit(numel, dtype):
    noise = F.dropout(torch.ones(numel, dtype=dtype), 0.1)
    code = two_valued(noise)
    assert torch.equal(code.decode(), noise)
    assert code.packed.nbytes == math.ceil(numel / 8)


def test_dropout_on_cpu_end_to_end():
    values, coded = torch.randn(64, 64), []

    def codec(tensor):
        coded.append(two_valued(tensor))
        return coded[-1]

    torch.manual_seed(0)
    expected = gradient(lambda x: F.dropout(x, 0.3), values)
    torch.manual_seed(0)
    assert torch.equal(gradient(lambda x: F.dropout(x, 0.3), values, codec), expected)
    assert len(coded) == 1


@pytest.mark.parametrize(
    'values',
    [
        torch.zeros(10),
        torch.tensor([math.nan, 1.0]).repeat(9),
        torch.tensor([-0.0, 0.0]).repeat(9),
        torch.tensor([math.inf, -math.inf, -math.inf]),
        torch.tensor([3, -5]),
        (torch.randn(2, 3, 4, 5) > 0).float().to(memory_format=torch.channels_last),
    ],
)
def test_any_two_values_bit_for_bit(values):
    decoded = two_valued(values).decode()
    assert decoded.dtype == values.dtype and decoded.stride() == values.stride()
    raw = torch.int32 if values.dtype == torch.float32 else values.dtype
    assert torch.equal(decoded.view(raw), values.view(raw))


def test_more_than_two_values_are_kept_as_they_are():
    assert two_valued(torch.randn(5000)) is None
    assert two_valued(torch.empty(0)) is None
    hidden = torch.zeros(5000)
    hidden[4999], hidden[1] = 1, 0.5  # not in the sample
    assert two_valued(hidden) is None


@pytest.mark.parametrize(
    ('low', 'high', 'expected'),
    [
        (0, 255, torch.uint8),
        (0, 256, torch.int16),
        (-1, 10, torch.int16),
        (-(2**15), 2**15 - 1, torch.int16),
        (0, 2**15, torch.int32),
        (-(2**31), 2**31 - 1, torch.int32),
    ],
)
def test_integers_in_the_narrowest_dtype(low, high, expected):
    values = torch.tensor([[low, high, 0], [1, 2, high]]).t()
    code = narrow_ints(values)
    assert code.narrowed.dtype == expected
    assert code.narrowed.nbytes == 6 * expected.itemsize
    decoded = code.decode()
    assert torch.equal(decoded, values)
    assert decoded.dtype == values.dtype and decoded.stride() == values.stride()


def test_integers_that_need_their_width_are_kept_as_they_are():
    assert narrow_ints(torch.tensor([0, 2**31])) is None
    assert narrow_ints(torch.tensor([-(2**31) - 1])) is None
    assert narrow_ints(torch.tensor([3], dtype=torch.uint8)) is None
    assert narrow_ints(torch.tensor([300], dtype=torch.int16)) is None
    assert narrow_ints(torch.empty(0, dtype=torch.int64)) is None


def test_on_an_accelerator_the_known_bound_counts_and_nothing_is_looked_at():
    meta = torch.zeros(9, dtype=torch.int64, device='meta')  # which has nothing to look at
    for below, dtype in ((256, torch.uint8), (257, torch.int16), (2**15 + 1, torch.int32)):
        assert narrow_ints(meta, below).narrowed.dtype == dtype
    assert narrow_ints(torch.arange(9), 2**40).narrowed.dtype == torch.uint8
    assert two_valued(torch.zeros(9, device='meta')) is None


@pytest.mark.parametrize('dtype', [torch.float32, torch.bool])
def test_narrow_is_for_integers(dtype):
    with pytest.raises(TypeError, match='integers'):
        narrow_ints(torch.ones(3, dtype=dtype))


def test_max_pool_from_shape_and_narrow_indices():
    def codec(tensor):
        return shape_only(tensor) if tensor.is_floating_point() else narrow_ints(tensor)

    for layout in (torch.contiguous_format, torch.channels_last):
        values = torch.randn(2, 3, 8, 8).contiguous(memory_format=layout)
        for pool in (lambda x: F.max_pool2d(x, 3, 2), lambda x: F.avg_pool2d(x, 2)):
            coded, plain = gradient(pool, values, codec), gradient(pool, values)
            assert torch.equal(coded, plain)
            assert coded.stride() == plain.stride()


@pytest.mark.parametrize('values', LAYOUTS)
def test_shape_alone(values):
    code = shape_only(values)
    decoded = code.decode()
    assert decoded.shape == values.shape and decoded.stride() == values.stride()
    assert decoded.dtype == values.dtype and not decoded.any()
    assert not any(isinstance(held, torch.Tensor) for held in vars(code).values())


def test_global_random_state_and_inputs_are_untouched():
    values, before = torch.randn(50).relu(), torch.get_rng_state()
    kept = values.clone()
    for codec in (positive_mask, sign_mask, shape_only, two_valued):
        codec(values)
    assert torch.equal(values, kept)
    assert torch.equal(torch.get_rng_state(), before)


def test_codes_are_apart_from_the_tensor():
    for values, codec in ((torch.ones(9), two_valued), (torch.ones(9).long(), narrow_ints)):
        code = codec(values)
        values.zero_()
        assert (code.decode() == 1).all()


def test_pickle():
    for code in (
        positive_mask(torch.randn(9)),
        narrow_ints(torch.arange(9)),
        shape_only(torch.randn(2, 3)),
    ):
        assert torch.equal(pickle.loads(pickle.dumps(code)).decode(), code.decode())
