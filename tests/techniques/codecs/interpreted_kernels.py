"""The codecs' kernels on CPU tensors, by Triton's interpreter; `test_kernels.py` runs this file.

Triton asks for ``TRITON_INTERPRET`` when it is imported, so this needs a process of its own.
"""

import warnings

import pytest
import torch

from memengine._torch_private import compiled_kernels
from memengine._torch_private.ops import TorchDispatchMode
from memengine.techniques.codecs import sparse
from memengine.techniques.codecs.kept_positions import Bitmap, Offsets
from memengine.techniques.codecs.kernels import bits as bit_kernels
from memengine.techniques.codecs.kernels import largest_values, quantizing, selection
from memengine.techniques.codecs.lossless import between, bitmask, positive_mask, sign_mask
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Sparsifier
from memengine.techniques.modules.forward_state import PrivateRandomState
from memengine.techniques.modules.private_random import restart_private_generators

# What the interpreter says of NaN and infinity, where the kernels mean them.
pytestmark = pytest.mark.filterwarnings('ignore::RuntimeWarning')


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    """Codecs use the kernels on CPU tensors, too."""
    monkeypatch.setattr(compiled_kernels, '_can_be_read', lambda *_: True)
    torch.manual_seed(0)
    restart_private_generators()


@pytest.mark.parametrize(
    ('dtype', 'group_size', 'bits'),
    [
        *((torch.float32, 256, bits) for bits in (8, 4, 2, 1)),
        *((torch.bfloat16, 24, bits) for bits in (8, 1)),
        *((torch.float16, 72, bits) for bits in (4, 2)),
        (torch.float32, 8, 1),
    ],
)
def test_quantising_agrees_with_the_eager_form(dtype, group_size, bits):
    for by_channel in (False, True):
        quantizing.compare_with_eager(torch.empty(0, dtype=dtype), bits, group_size, by_channel)


WRONG = {
    'levels': lambda packed, extremes: (packed ^ 1, extremes),
    'half of a byte': lambda packed, extremes: (packed & 0x0F, extremes),
    'order': lambda packed, extremes: (packed.flip(0), extremes),
    'extremes': lambda packed, extremes: (packed, extremes * 1.01),
    'NaN': lambda packed, extremes: (packed, extremes.nan_to_num()),
}


@pytest.mark.parametrize(('wrong', 'bits'), [*((wrong, 2) for wrong in WRONG), ('levels', 8)])
def test_wrong_kernels_are_seen(monkeypatch, wrong, bits):
    right = quantizing.quantize
    monkeypatch.setattr(quantizing, 'quantize', lambda *a, **k: WRONG[wrong](*right(*a, **k)))
    with pytest.raises(ArithmeticError):
        quantizing.compare_with_eager(torch.empty(0), bits, 16, False)


@pytest.mark.parametrize('wrong', [lambda x: x + 0.1, lambda x: x.flip(0), torch.zeros_like])
def test_wrong_decoding_is_seen(monkeypatch, wrong):
    right = quantizing.dequantize
    monkeypatch.setattr(quantizing, 'dequantize', lambda *a: wrong(right(*a)))
    with pytest.raises(ArithmeticError):
        quantizing.compare_with_eager(torch.empty(0), 4, 16, False)


def test_noise_that_is_none_is_seen(monkeypatch):
    right = quantizing.quantize
    monkeypatch.setattr(
        quantizing,
        'quantize',
        lambda *a, **k: right(*a[:3], stochastic=False),
    )
    with pytest.raises(ArithmeticError):
        quantizing.compare_with_eager(torch.empty(0), 4, 16, False)


@pytest.mark.parametrize('bits', [8, 2, 1])
def test_random_rounding_is_unbiased_and_independent(monkeypatch, bits):
    monkeypatch.setattr(quantizing, '_TILE_NUMEL', 8192)  # each takes the interpreter as long
    draws = 64
    values = torch.linspace(-2, 2, 256).sin()
    values[0], values[1] = -1, 1
    decoded = Quantizer(bits)(values.repeat(draws)).decode().view(draws, -1).double()
    steps = (values.double() + 1) * (2**bits - 1) / 2
    errors = (decoded - values) * (2**bits - 1) / 2
    inner = (steps.frac() > 0.02) & (steps.frac() < 0.98)
    z = errors[:, inner] / (steps.frac() * (1 - steps.frac())).sqrt()[inner]
    of_means = z.mean(0) * draws**0.5
    assert 0.5 < of_means.square().mean() < 2  # 1, and 0.1 off for 200 elements
    assert of_means.abs().max() < 6
    assert abs(z.mean()) * z.numel() ** 0.5 < 6
    flat = z.flatten()
    for lag in (1, 8, z.shape[1], 2 * z.shape[1]):  # neighbours, and the same place of a group
        assert abs((flat[lag:] * flat[:-lag]).mean()) * flat.numel() ** 0.5 < 6


def test_what_is_drawn_follows_the_seed_and_goes_back_with_it():
    values, quantizer = torch.randn(600), Quantizer(2)
    before = torch.get_rng_state()
    start = PrivateRandomState()
    first, second = quantizer(values).packed, quantizer(values).packed
    assert not torch.equal(first, second)
    start.restore()
    assert torch.equal(quantizer(values).packed, first)
    restart_private_generators()
    assert torch.equal(quantizer(values).packed, first)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert not torch.equal(quantizer(values).packed, first)


IMAGE = torch.arange(2 * 3 * 16 * 5, dtype=torch.float32).view(2, 3, 16, 5)


def assert_same_but_for_ties(decoded, expected, values):
    """Where two decodings differ, the value lies halfway between them."""
    off = ~torch.isclose(decoded, expected, atol=1e-5)
    distances = [(one - values).abs()[off] for one in (decoded, expected)]
    torch.testing.assert_close(*distances, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    'values',
    [
        IMAGE.to(memory_format=torch.channels_last),
        IMAGE[..., ::2],
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.randn(5, 1, 7).expand(5, 4, 7),
        torch.randn(5003),
    ],
)
def test_codecs_give_what_they_give_without_kernels(values):
    def code():
        code = Quantizer(4, stochastic=False)(values)
        return code, code.decode()

    fused, decoded = code()
    assert fused.part_numel == 256
    with compiled_kernels.without_kernels():
        eager, expected = code()
    assert eager.part_numel != 256
    assert_same_but_for_ties(decoded, expected, values)
    assert decoded.shape == expected.shape and decoded.stride() == expected.stride()
    assert fused.packed.nbytes == eager.packed.nbytes
    assert torch.equal(fused.extremes, eager.extremes)
    assert_same_but_for_ties(fused.decode(), expected, values)  # whoever decodes it


def test_a_wrong_kernel_is_warned_of_once_and_not_used(monkeypatch):
    right = quantizing.quantize
    monkeypatch.setattr(compiled_kernels, '_agreed', {})
    monkeypatch.setattr(compiled_kernels, '_given_up', set())
    monkeypatch.setattr(quantizing, 'quantize', lambda *a, **k: WRONG['levels'](*right(*a, **k)))
    values = torch.randn(700)
    with pytest.warns(UserWarning, match=r'kernels.quantizing are not used on cpu \(Arithmetic'):
        decoded = Quantizer(8, stochastic=False)(values).decode()
    assert (decoded - values).abs().max() < 0.02
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Quantizer(4)(values.half()).decode()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_bits_agree_with_the_eager_form(dtype):
    values = torch.linspace(-3, 3, 1003)
    values[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0, -0.0, 1e-45])
    if dtype == torch.bool:
        codecs, values = [bitmask], values > 1
    else:
        codecs, values = [positive_mask, sign_mask, from_0_to_1], values.to(dtype)
    for codec in codecs:
        for tensor in (
            values,
            values[:5],
            values[:0],
            values[:1002].view(2, 3, -1).transpose(0, 2),
        ):
            code = codec(tensor)
            decoded = code.decode()
            with compiled_kernels.without_kernels():
                assert torch.equal(code.packed, codec(tensor).packed)
                assert torch.equal(decoded, code.decode())
            assert decoded.stride() == tensor.stride() and decoded.dtype == dtype


def from_0_to_1(tensor):
    return between(tensor, 0, 1, 0.5, torch.inf)


@pytest.mark.parametrize('form', ['pack_within', 'select'])
def test_wrong_bits_are_seen(monkeypatch, form):
    right = getattr(bit_kernels, form)
    for wrong in (lambda x: x ^ 1, torch.zeros_like, lambda x: x.flip(0)):
        monkeypatch.setattr(bit_kernels, form, lambda *a, wrong=wrong: wrong(right(*a)))
        with pytest.raises(ArithmeticError):
            bit_kernels.compare_with_eager(torch.empty(0), torch.float32)


@pytest.mark.parametrize(
    ('settings', 'places'),
    [
        (dict(strategy='block_mink', gamma=0.9), Offsets),
        (dict(strategy='block_mink', gamma=0.5, block_size=100), Bitmap),
        (dict(strategy='block_mink', gamma=0.7, block_size='row'), Bitmap),
        (dict(strategy='mink', gamma=0.95), Offsets),
        (dict(strategy='mink', gamma=0.5), Bitmap),
    ],
)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_selection_agrees_with_the_eager_form(monkeypatch, settings, places, dtype):
    monkeypatch.setattr(sparse, '_MASKED_AT_ONCE', 500)
    magnitudes = torch.randperm(1200) + 1 if dtype == torch.float32 else torch.arange(1200) % 128
    values = (magnitudes * torch.tensor([1, -1]).repeat(600)).to(dtype).view(2, 600)
    values = values[:, :-3] if settings.get('block_size') != 'row' else values.t()
    sparsifier = Sparsifier(**settings)
    code = sparsifier(values)
    decoded = code.decode()
    assert isinstance(code.places, places)
    with compiled_kernels.without_kernels():
        eager = sparsifier(values)
        expected = eager.decode()
        assert torch.equal(code.decode(), decoded)
    assert decoded.stride() == expected.stride()
    if dtype == torch.float32:  # without ties
        assert torch.equal(decoded, expected)
    assert torch.equal(decoded.abs().sum(), expected.abs().sum())
    assert torch.equal(decoded[decoded != 0], values[decoded != 0])
    assert code.values.nbytes == eager.values.nbytes


def test_wrong_selection_is_seen(monkeypatch):
    like, right = torch.empty(0), selection.largest_of_blocks
    for wrong in (lambda v, p: (v, p.flip(0)), lambda v, p: (v.flip(0), p)):
        monkeypatch.setattr(
            selection, 'largest_of_blocks', lambda *a, wrong=wrong, **k: wrong(*right(*a, **k))
        )
        with pytest.raises(ArithmeticError):
            selection.compare_with_eager(like, 16)
    monkeypatch.setattr(selection, 'largest_of_blocks', right)
    selection.compare_with_eager(like, 16)
    monkeypatch.setattr(selection, 'scatter', lambda *of: of[4])
    with pytest.raises(ArithmeticError):
        selection.compare_with_eager(like, 16)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_of_all_are_torchs(dtype):
    largest_values.compare_with_eager(torch.empty(0, dtype=dtype))


WRONG_LARGEST = {
    'an element': ('largest_of_all', lambda values, *places: (values.flip(0), *places)),
    'a place': ('largest_of_all', lambda values, found, n: (values, found.roll(1), n)),
    'a count': ('largest_of_all', lambda values, found, n: (values, found, n.roll(1))),
    'what is put back': ('scatter', lambda flat: flat.roll(1)),
    'what is not': ('scatter', lambda flat: flat.where(flat != 0, 1)),
}


@pytest.mark.parametrize('what', WRONG_LARGEST)
def test_a_wrong_largest_is_seen(monkeypatch, what):
    form, wrong = WRONG_LARGEST[what]
    right = getattr(largest_values, form)

    def damaged(*args, **kwargs):
        found = right(*args, **kwargs)
        return wrong(*found) if isinstance(found, tuple) else wrong(found)

    monkeypatch.setattr(largest_values, form, damaged)
    with pytest.raises(ArithmeticError, match='the largest of all'):
        largest_values.compare_with_eager(torch.empty(0, dtype=torch.bfloat16))


class Kernels(TorchDispatchMode):
    """Counts what would be kernels of a GPU: ours, and torch's operations but views."""

    on_the_host = 'aten::random_', 'aten::_local_scalar_dense', 'aten::promote_types'

    def __init__(self, monkeypatch):
        super().__init__()
        self.count, run = 0, type(largest_values._count).run
        self._is_in_ours = False

        def counted(*args, **kwargs):
            self.count += 1
            self._is_in_ours = True
            run(*args, **kwargs)
            self._is_in_ours = False

        monkeypatch.setattr(type(largest_values._count), 'run', counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, results = function._schema.name, function._schema.returns
        is_view = any(r.alias_info and not r.alias_info.is_write for r in results)
        is_none = is_view or 'empty' in name or name in self.on_the_host
        self.count += not (self._is_in_ours or is_none)
        return function(*args, **kwargs or {})


def by_maps(tensor):
    return Quantizer(8, by_channel=True)(tensor.view(10, 50, 10))


def test_a_range_without_a_reciprocal_leaves_its_neighbours_alone():
    values = torch.randn(40, 6)
    values[:, 2] *= 2.0**-140
    decoded = Quantizer(8, by_channel=True)(values).decode()
    assert (decoded[:, 2] - values[:, 2]).abs().max() < 2.0**-120
    assert (decoded - values).abs().max() < 0.05


@pytest.mark.parametrize(
    ('codec', 'dtype', 'coding', 'decoding'),
    [
        (Quantizer(8), torch.float32, 1, 1),
        (Quantizer(2), torch.bfloat16, 1, 1),
        (Quantizer(2, by_channel=True), torch.bfloat16, 2, 1),
        (by_maps, torch.float32, 2, 1),
        (positive_mask, torch.float32, 1, 1),
        (Sparsifier('block_mink', 0.9), torch.float32, 1, 1),
        (Sparsifier('mink', 0.9), torch.bfloat16, 3, 1),
        (Sparsifier('mink', 0.5), torch.bfloat16, 3, 1),
        (Sparsifier('mink', 0.9), torch.float32, 4, 1),
        (Sparsifier('mink', 0.5), torch.float32, 4, 1),
    ],
)
def test_kernels_for_a_saved_tensor(monkeypatch, codec, dtype, coding, decoding):
    values = torch.randn(10, 500).to(dtype)
    codec(values).decode()  # what proves itself has done so
    kernels = Kernels(monkeypatch)
    with kernels:
        code = codec(values)
    assert kernels.count == coding
    with kernels:
        code.decode()
    assert kernels.count == coding + decoding
