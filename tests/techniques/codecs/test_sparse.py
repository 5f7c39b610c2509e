"""DropIT's codec against its definition: which elements come back, as what, for how many bytes."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from memengine.memory.ledger import blocks_of, tensors_in
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Cast, Sparsifier
from memengine.techniques.modules.forward_state import RandomState
from memengine.techniques.modules.private_random import restart_private_generators

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CHANNELS_LAST = torch.channels_last


def distinct(*shape):
    """The numbers from 1 on in random order, with random signs: few bits tell them apart."""
    magnitudes = 1 + torch.randperm(math.prod(shape)).float()
    return (magnitudes * (torch.randint(2, magnitudes.shape) * 2 - 1)).view(shape)


TENSORS = {
    'one dimension': lambda: distinct(1000),
    'of whole blocks': lambda: distinct(4, 256),
    'odd': lambda: distinct(3, 5, 7, 11),
    'channels_last': lambda: distinct(2, 6, 5, 7).to(memory_format=CHANNELS_LAST),
    'transposed': lambda: distinct(30, 40).t(),
    'permuted': lambda: distinct(4, 5, 60).permute(2, 0, 1),
    'with gaps': lambda: distinct(40, 50)[:, ::2],
    'a part': lambda: distinct(7, 300)[2:5],
    'expanded': lambda: distinct(20, 1, 30).expand(20, 4, 30),
    'of sizes 1': lambda: distinct(1, 600, 1),
    'few': lambda: distinct(3),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    restart_private_generators()


def code_bytes(code):
    return sum({b.key: b.nbytes for t in tensors_in(code) for b in blocks_of(t)}.values())


def in_memory(tensor):
    """Its elements as they lie in memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(order).reshape(-1)


def smallest_dropped(flat, kept):
    """The definition, by a full sort. No two magnitudes may be equal."""
    order = flat.double().abs().argsort(descending=True)
    return torch.zeros_like(flat).index_copy_(0, order[:kept], flat[order[:kept]])


@pytest.mark.parametrize('gamma', [0.1, 0.31, 0.5, 0.7, 0.9, 0.97, 0.999])
@pytest.mark.parametrize('name', TENSORS)
def test_mink_is_the_whole_tensor_without_its_smallest(name, gamma):
    tensor = TENSORS[name]()
    once = tensor[:, :1] if name == 'expanded' else tensor
    decoded = Sparsifier('mink', gamma)(tensor).decode()
    kept = max(1, int(once.numel() * (1 - gamma)))
    expected = smallest_dropped(once.reshape(-1), kept).view(once.shape)
    assert torch.equal(decoded, expected.expand(tensor.shape))


@pytest.mark.parametrize('block_size', [7, 64, 256, 300, 4096, 'row'])
@pytest.mark.parametrize('gamma', [0.31, 0.5, 0.9])
@pytest.mark.parametrize('name', [name for name in TENSORS if name != 'expanded'])
def test_block_mink_is_each_block_without_its_smallest(name, gamma, block_size):
    tensor = TENSORS[name]()
    row = 6 if name == 'channels_last' else max(tensor.shape)
    row = {'odd': 11, 'with gaps': 25, 'transposed': 40, 'permuted': 60}.get(name, row)
    size = row if block_size == 'row' else block_size
    expected = [
        smallest_dropped(block, max(1, len(block) - round(len(block) * gamma)))
        for block in in_memory(tensor).split(size)
    ]
    decoded = Sparsifier('block_mink', gamma, block_size)(tensor).decode()
    assert torch.equal(in_memory(decoded), torch.cat(expected))


def neighbours(dtype, count, step=1):
    """Numbers from 1 on in random order, each so many of the dtype's steps from the next."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    one = torch.ones(1, dtype=dtype).view(integers)
    return (one + step * torch.randperm(count).to(integers)).view(dtype)


@pytest.mark.parametrize('dtype', DTYPES)
def test_mink_compares_every_dtype_in_its_own_precision(dtype):
    """All but bf16 itself tell numbers apart where bf16 does not."""
    tensor = neighbours(dtype, 256)
    decoded = Sparsifier('mink', 0.5)(tensor).decode()
    assert decoded.dtype == dtype
    assert torch.equal(decoded, smallest_dropped(tensor, 128))


@pytest.mark.parametrize(
    ('dtype', 'size', 'step'),
    [
        (torch.bfloat16, 128, 1),
        (torch.float16, 256, 1),
        (torch.float32, 256, 2**8),
        (torch.float32, 768, 2**10),
        (torch.float32, 2**16 + 1, 1),
        (torch.float64, 256, 2**8),
    ],
)
def test_a_position_in_a_block_takes_bits_of_precision(dtype, size, step):
    tensor = neighbours(dtype, size, step)
    decoded = Sparsifier('block_mink', 0.5, size)(tensor).decode()
    assert torch.equal(decoded, smallest_dropped(tensor, size - round(size / 2)))
    if step > 1:
        closer = neighbours(dtype, size)
        decoded = Sparsifier('block_mink', 0.5, size)(closer).decode()
        assert (decoded != 0).sum() == size - round(size / 2)
        assert not torch.equal(decoded, smallest_dropped(closer, size // 2))


@pytest.mark.parametrize('strategy', ['mink', 'random', 'block_mink'])
@pytest.mark.parametrize('name', TENSORS)
def test_shape_and_strides(name, strategy):
    tensor = TENSORS[name]().requires_grad_()
    decoded = Sparsifier(strategy, 0.5)(tensor).decode()
    assert not decoded.requires_grad
    assert decoded.shape == tensor.shape
    gaps = name == 'with gaps'
    assert decoded.stride() == (torch.empty_like(tensor).stride() if gaps else tensor.stride())


@pytest.mark.parametrize('strategy', ['mink', 'random', 'block_mink'])
def test_a_code_is_apart_from_what_it_was_made_of_and_from_what_it_gives(strategy):
    tensor = torch.randn(1000)
    code = Sparsifier(strategy, 0.5)(tensor)
    first = code.decode()
    expected = first.clone()
    first.fill_(7), tensor.fill_(8)
    assert torch.equal(code.decode(), expected)


@pytest.mark.parametrize('shape', [(), (1,), (0,), (3, 0, 2), (2,)])
@pytest.mark.parametrize('strategy', ['mink', 'random', 'block_mink'])
def test_tiny_tensors(shape, strategy):
    tensor = torch.randn(shape)
    decoded = Sparsifier(strategy, 0.9)(tensor).decode()
    assert decoded.shape == tensor.shape
    assert (decoded != 0).sum() == min(1, tensor.numel())
    assert torch.equal(decoded[decoded != 0], tensor[decoded != 0])


@pytest.mark.parametrize('strategy', ['mink', 'random', 'block_mink'])
@pytest.mark.parametrize('name', TENSORS)
def test_gamma_0_is_the_tensor_itself(name, strategy):
    tensor = TENSORS[name]()
    code = Sparsifier(strategy, 0.0)(tensor)
    decoded = code.decode()
    assert (decoded.data_ptr(), decoded.stride()) == (tensor.data_ptr(), tensor.stride())
    assert decoded.shape == tensor.shape


def test_gamma_0_notices_what_autograd_would_notice():
    tensor = torch.randn(10)
    code = Sparsifier('mink', 0.0)(tensor)
    tensor.relu_()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        code.decode()


def test_gamma_0_passes_a_nested_codec():
    tensor = torch.randn(30, 40).t()
    code = Sparsifier('mink', 0.0, values=Cast())(tensor)
    assert torch.equal(code.decode(), tensor.bfloat16().float())
    assert code_bytes(code) == 2400


@pytest.mark.parametrize('strategy', ['mink', 'block_mink'])
@pytest.mark.parametrize('dtype', DTYPES)
def test_what_is_not_finite_is_kept(dtype, strategy):
    tensor = torch.randn(1000).to(dtype)
    special = [math.nan, -math.nan, math.inf, -math.inf, torch.finfo(dtype).max]
    where = torch.tensor([3, 270, 500, 800, 999])
    tensor[where] = torch.tensor(special, dtype=dtype)
    code = Sparsifier(strategy, 0.97, values=Cast())(tensor)
    assert torch.equal(code.decode()[where].isnan(), tensor[where].isnan())
    assert torch.equal(code.decode()[where].isinf(), tensor[where].isinf())
    assert (code.decode()[where] != 0).all()


def test_nan_is_larger_than_infinity():
    tensor = torch.full((256,), math.inf)
    tensor[77] = math.nan
    for strategy in ('mink', 'block_mink'):
        decoded = Sparsifier(strategy, 0.99)(tensor).decode()
        assert decoded[77].isnan()


@pytest.mark.parametrize('strategy', ['mink', 'block_mink'])
@pytest.mark.parametrize('gamma', [0.5, 0.9])
def test_ties_do_not_change_how_many_are_kept(strategy, gamma):
    for tensor in (torch.ones(1024), torch.randint(1, 4, (1024,)).float()):
        decoded = Sparsifier(strategy, gamma)(tensor).decode()
        kept = decoded != 0
        per_block = 256 - round(256 * gamma)
        expected = int(1024 * (1 - gamma)) if strategy == 'mink' else 4 * per_block
        assert kept.sum() == expected
        assert torch.equal(decoded[kept], tensor[kept])
        if strategy == 'mink':
            assert decoded[kept].min() >= tensor[~kept].max()


def test_zeros_need_no_bytes():
    tensor = torch.zeros(4096)
    tensor[::10] = torch.randn(410)
    code = Sparsifier('mink', 0.5)(tensor)
    assert torch.equal(code.decode(), tensor)
    assert code_bytes(code) == 410 * (4 + 1) + 2 * 16  # an eighth of them would be 512
    code = Sparsifier('mink', 0.5)(torch.zeros(4096))
    assert torch.equal(code.decode(), torch.zeros(4096))
    assert code_bytes(code) == 2 * 16


BYTES = {  # of 16 x 256 elements: values, and places
    ('mink', 0.5): 2048 * 4 + 512,
    ('mink', 0.9): 409 * 4 + 409 + 32,
    ('random', 0.9): 409 * 4 + 409 + 32,
    ('block_mink', 0.5): 2048 * 4 + 512,
    ('block_mink', 0.87): 16 * 33 * 4 + 512,
    ('block_mink', 0.9): 16 * 26 * (4 + 1),
}


@pytest.mark.parametrize(('strategy', 'gamma'), BYTES)
def test_bytes(strategy, gamma):
    tensor = torch.randn(16, 256)
    expected = BYTES[strategy, gamma]
    assert code_bytes(Sparsifier(strategy, gamma)(tensor)) == expected
    values = Sparsifier(strategy, gamma, values=Cast())(tensor)
    kept = (values.decode() != 0).sum().item()
    assert code_bytes(values) == expected - 2 * kept
    assert code_bytes(Sparsifier(strategy, gamma)(tensor.double())) == expected + 4 * kept


@pytest.mark.parametrize(
    ('arguments', 'share'),
    [
        (('mink',), 0.127),
        (('block_mink',), 0.127),
        (('block_mink', 0.9, 'row'), 0.124),  # 19 of 192
        (('block_mink', 0.9, 256, Cast()), 0.0762),
    ],
)
def test_bytes_of_a_layers_input(arguments, share):
    tensor = torch.randn(16, 197, 192)
    code = Sparsifier(*arguments)(tensor)
    assert code_bytes(code) / (tensor.numel() * 4) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('strategy', ['mink', 'random', 'block_mink'])
@pytest.mark.parametrize('values', [None, Cast()])
def test_above_a_third_it_never_costs_more(dtype, strategy, values):
    for numel in [1, 2, 3, 5, 9, 200, 257, 3000]:
        tensor = torch.randn(numel).to(dtype)
        for gamma in [0.31, 0.5, 0.87, 0.9, 0.99]:
            for block_size in [1, 3, 16, 256, 1000] if strategy == 'block_mink' else [None]:
                code = Sparsifier(strategy, gamma, block_size, values)(tensor)
                assert code_bytes(code) <= numel * dtype.itemsize


@pytest.mark.parametrize('strategy', ['mink', 'random', 'block_mink'])
@pytest.mark.parametrize('gamma', [0.0, 0.5, 0.9])
def test_values_in_few_bits(strategy, gamma):
    """Where a value is and which ones are kept is as without; the values are nearly so."""
    tensor = torch.rand(3000) + 1
    plain = Sparsifier(strategy, gamma)(tensor)
    restart_private_generators()
    code = Sparsifier(strategy, gamma, values=Quantizer(8))(tensor)
    kept = plain.decode() != 0
    assert torch.equal(code.decode() != 0, kept)
    torch.testing.assert_close(code.decode(), plain.decode(), atol=1 / 255, rtol=0)
    values, count = code_bytes(plain) - code_bytes(code), kept.sum().item()
    assert values == 3 * count - 8 * math.ceil(count / 256), 'a byte, and two ends of each 256'


def test_no_values_in_few_bits():
    code = Sparsifier('mink', 0.5, values=Quantizer(8))(torch.zeros(1000))
    assert torch.equal(code.decode(), torch.zeros(1000))


def test_a_layer_that_keeps_codes():
    """As a codec is used: the gradient is the formula's, and nothing of the dense input is kept."""
    tensor, weight = distinct(64, 256), torch.randn(8, 256, requires_grad=True)
    codes = []

    def pack(saved):
        codes.append(Sparsifier('block_mink', 0.9)(saved))
        return codes[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda code: code.decode()):
        output = tensor @ weight.t()
    gradient = torch.randn_like(output)
    output.backward(gradient)
    rows = torch.stack([smallest_dropped(row, 26) for row in tensor])
    torch.testing.assert_close(weight.grad, gradient.t() @ rows)
    assert [code_bytes(code) for code in codes] == [64 * 26 * 5]


def test_random_is_uniform_and_exact():
    """Inclusion of each element, and of pairs of neighbours, over many draws."""
    tensor, draws, kept = torch.ones(200), 1500, 60
    sparsifier = Sparsifier('random', 0.7)
    drawn = torch.stack([sparsifier(tensor).decode() for _ in range(draws)])
    assert torch.equal(drawn.unique(), torch.tensor([0.0, 1.0])), 'values are not scaled'
    assert (drawn.sum(1) == kept).all()
    share = kept / 200
    deviation = (share * (1 - share) / draws) ** 0.5
    z = (drawn.mean(0) - share) / deviation
    assert z.abs().max() < 4.5
    assert 0.7 < z.var() < 1.3
    both = (drawn[:, :-1] * drawn[:, 1:]).mean()
    assert both == pytest.approx(share * (kept - 1) / 199, rel=0.02)


def test_random_follows_the_seed_and_leaves_the_global_generator_alone():
    tensor, sparsifier = torch.randn(1000), Sparsifier('random', 0.9)
    state = RandomState()
    first, second = sparsifier(tensor).decode(), sparsifier(tensor).decode()
    assert state.unchanged()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    other = sparsifier(tensor).decode()
    torch.manual_seed(0)
    assert torch.equal(sparsifier(tensor).decode(), first)
    assert not torch.equal(other, first)


def test_gamma_may_change_and_is_checked_whenever_it_does():
    sparsifier, tensor = Sparsifier('mink', 0.5), torch.randn(1000)
    for gamma in (0.9, 0.0, 0.25):
        sparsifier.gamma = gamma
        assert (sparsifier(tensor).decode() != 0).sum() == int(1000 * (1 - gamma))
    for gamma in (1.0, -0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match='gamma: expected the share'):
            sparsifier.gamma = gamma
        with pytest.raises(ValueError, match='gamma: expected the share'):
            Sparsifier('mink', gamma)
    assert sparsifier.gamma == 0.25


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="got 'min_k'; did you mean 'mink'"):
        Sparsifier('min_k')
    for block_size in (0, -1, 2.5, 'rows'):
        with pytest.raises(ValueError, match='block_size: expected'):
            Sparsifier('block_mink', block_size=block_size)
    for strategy in ('mink', 'random'):
        with pytest.raises(ValueError, match="'block_mink' has blocks, got block_size=256 with"):
            Sparsifier(strategy, block_size=256)
    with pytest.raises(TypeError, match=r'torch\.float32.*got torch\.int64'):
        Sparsifier()(torch.arange(3))
    with pytest.raises(ValueError, match=r'dtype: expected .*, got torch\.int8'):
        Cast(torch.int8)


@pytest.mark.parametrize('strategy', ['mink', 'block_mink'])
def test_pickle(strategy):
    block_size = 64 if strategy == 'block_mink' else None
    sparsifier = Sparsifier(strategy, 0.8, block_size, Cast(torch.float16))
    tensor = torch.randn(500)
    copied = pickle.loads(pickle.dumps(sparsifier))
    code = pickle.loads(pickle.dumps(copied(tensor)))
    assert torch.equal(code.decode(), sparsifier(tensor).decode())


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_cast(dtype):
    tensor = torch.randn(30, 40).t()
    code = Cast(dtype)(tensor)
    assert code_bytes(code) == 30 * 40 * 2
    assert torch.equal(code.decode(), tensor.to(dtype).float())
    assert code.decode().stride() == tensor.stride()
    largest = torch.finfo(torch.float32).max
    special = torch.tensor([largest, -largest, math.inf, -math.inf, math.nan, -0.0])
    decoded = Cast(dtype)(special).decode()
    limit = torch.finfo(dtype).max
    expected = torch.tensor([limit, -limit, math.inf, -math.inf, math.nan, -0.0])
    assert torch.equal(
        decoded.nan_to_num(5.0, math.inf, -math.inf), expected.nan_to_num(5.0, math.inf, -math.inf)
    )
    assert decoded[-1].signbit()


def test_cast_leaves_what_is_no_larger():
    tensor = torch.randn(10).half()
    assert Cast(torch.bfloat16)(tensor).decode().data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize('strategy', ['mink', 'block_mink'])
def test_on_cuda_it_is_the_same(strategy):
    tensor = torch.randn(10, 1000)
    for gamma in (0.5, 0.9):
        sparsifier = Sparsifier(strategy, gamma, values=Cast())
        decoded = sparsifier(tensor.cuda()).decode()
        assert decoded.is_cuda
        assert torch.equal(decoded.cpu(), sparsifier(tensor).decode())
