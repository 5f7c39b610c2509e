"""The meter against byte counts done by hand (float32 unless said otherwise)."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memengine.memory import SavedBytes, hidden_bytes, saved_bytes
from memengine.testing import run_ranks

F32 = 4


def _kept(fn, *exclude):
    """Bytes that the graph of ``fn()`` keeps, before any backward."""
    with SavedBytes(*exclude) as meter:
        output = fn()
        kept = meter.live_bytes
    del output
    assert meter.live_bytes == 0
    return kept


# ------------------------------------------------------------------ counts by hand


def test_linear_keeps_its_input_and_not_its_weight():
    layer, x = nn.Linear(8, 16), torch.randn(5, 8)
    assert _kept(lambda: layer(x), layer) == 5 * 8 * F32
    assert _kept(lambda: layer(x)) == 5 * 8 * F32  # the input has no gradient: weight not needed
    x.requires_grad_()
    assert _kept(lambda: layer(x)) == (5 * 8 + 16 * 8) * F32
    assert _kept(lambda: layer(x), layer) == 5 * 8 * F32
    assert _kept(lambda: layer(x), layer, x) == 0


def test_gelu_layer_norm_and_softmax():
    x = torch.randn(6, 10, requires_grad=True)
    norm = nn.LayerNorm(10)
    assert _kept(lambda: F.gelu(x)) == 60 * F32  # input
    assert _kept(lambda: norm(x), norm) == (60 + 2 * 6) * F32  # input, mean and 1/std per row
    assert _kept(lambda: x.softmax(-1)) == 60 * F32  # output


def test_dtype_counts():
    x = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    assert _kept(lambda: F.gelu(x)) == 60 * 8


def test_convolution_keeps_its_input_once():
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    assert _kept(lambda: conv(x), conv) == 2 * 3 * 81 * F32


def test_batch_norm_buffers_are_the_models():
    norm, x = nn.BatchNorm1d(7), torch.randn(5, 7)
    # input, mean and 1/std of the batch
    assert _kept(lambda: norm(x), norm) == (5 * 7 + 2 * 7) * F32
    norm.eval()
    assert _kept(lambda: norm(x), norm) == 5 * 7 * F32
    assert _kept(lambda: norm(x)) == (5 * 7 + 3 * 7) * F32  # weight, running mean and variance


def test_one_tensor_into_q_k_and_v_counts_once():
    q, k, v = (nn.Linear(8, 8) for _ in range(3))
    x = torch.randn(5, 8, requires_grad=True)
    assert _kept(lambda: (q(x), k(x), v(x)), q, k, v) == 5 * 8 * F32


def test_views_count_their_storage_once():
    x = torch.randn(6, 30, requires_grad=True)

    def chunks():
        base = x * 2.0  # [6, 30]; keeps nothing: the factor is a Python number
        return [part.exp().sum() + F.gelu(part) for part in base.chunk(3, dim=1)]

    # three outputs of exp, and the one storage behind the three inputs of gelu
    assert _kept(chunks) == (3 * 60 + 180) * F32


def test_expanded_tensor_counts_what_it_occupies():
    x = torch.randn(1, 8, requires_grad=True)
    assert _kept(lambda: F.gelu(x.expand(1000, 8))) == 8 * F32


def test_tiny_vit_adds_up():
    """One block of DeiT-tiny, operation by operation."""
    model = timm.create_model('deit_tiny_patch16_224', img_size=32, depth=1, num_classes=0)
    images = torch.randn(2, 3, 32, 32)
    batch, tokens, width, heads = 2, 5, 192, 3  # tokens: 4 patches and the class token
    rows = batch * tokens
    layer_norm = rows * width + 2 * rows  # input, mean and 1/std
    expected = [
        images.numel(),  # patch embedding
        layer_norm,
        rows * width,  # input of qkv
        3 * rows * width,  # its output, saved as q, k and v
        batch * heads * tokens,  # log-sum-exp of the fused attention
        rows * width,  # its output, which is the input of proj
        layer_norm,
        rows * width,  # input of fc1
        rows * 4 * width,  # input of GELU
        rows * 4 * width,  # input of fc2
        layer_norm,  # the last norm
    ]
    assert _kept(lambda: model(images), model) == sum(expected) * F32


def test_no_grad_keeps_nothing():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    with SavedBytes() as meter, torch.no_grad():
        model(x)
    assert (meter.live_bytes, meter.peak_bytes, meter.total_bytes) == (0, 0, 0)


# ------------------------------------------------------------------ live, peak, total


def test_live_falls_and_peak_and_total_stay():
    x = torch.randn(10, 10, requires_grad=True)
    with SavedBytes() as meter:
        for steps in range(1, 4):
            x.exp().sum().backward()
            assert meter.live_bytes == 0
            assert meter.peak_bytes == 400
            assert meter.total_bytes == steps * 400
        first, second = x.exp(), x.exp()
        assert meter.live_bytes == meter.peak_bytes == 800
    del first
    assert meter.live_bytes == 400  # also after the exit
    del second
    assert (meter.live_bytes, meter.peak_bytes, meter.total_bytes) == (0, 800, 5 * 400)


def test_backward_frees_node_by_node():
    """The peak of two chained halves is their sum, and live falls inside of backward."""
    x = torch.randn(100, requires_grad=True)
    seen = []
    with SavedBytes() as meter:
        hidden = x.exp()
        hidden.register_hook(lambda _: seen.append(meter.live_bytes))
        hidden.sigmoid().sum().backward()
    assert meter.peak_bytes == 800
    assert seen == [400]


def test_retained_graph_stays_counted():
    x = torch.randn(10, requires_grad=True)
    with SavedBytes() as meter:
        y = x.exp().sum()
        y.backward(retain_graph=True)
        assert meter.live_bytes == 40
        y.backward()
        assert meter.live_bytes == 0


def test_nested_meters_see_everything_inside_them():
    x = torch.randn(10, requires_grad=True)
    with SavedBytes() as outer:
        a = x.exp()
        with SavedBytes() as inner:
            b = x.exp()
        c = x.exp()
    assert (outer.live_bytes, inner.live_bytes) == (120, 40)
    del b
    assert (outer.live_bytes, inner.live_bytes) == (80, 0)
    del a, c
    assert outer.live_bytes == 0


def test_one_meter_entered_twice_counts_once():
    x = torch.randn(10, requires_grad=True)
    meter = SavedBytes()
    with meter, meter:
        y = x.exp()
        assert meter.live_bytes == 40
    with meter:
        z = x.exp()
    assert meter.live_bytes == 80
    del y, z


def test_an_exception_leaves_no_hooks_entered():
    x = torch.randn(10, requires_grad=True)
    enter = saved_tensors_hooks.__enter__
    with pytest.raises(ZeroDivisionError), SavedBytes() as meter:
        x.exp()
        raise ZeroDivisionError
    total = meter.total_bytes
    y = x.exp()
    assert meter.total_bytes == total
    assert isinstance(y.grad_fn._saved_result, torch.Tensor)
    assert saved_tensors_hooks.__enter__ is enter


def test_exclude_takes_modules_and_tensors_only():
    with pytest.raises(TypeError, match='exclude.*str'):
        SavedBytes('model')


# ------------------------------------------------------------------ the step is unchanged


@pytest.mark.parametrize('seed', range(3))
def test_gradients_are_bit_identical(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.5),
    )
    x = torch.randn(4, 3, 6, 6)

    def grads():
        torch.manual_seed(seed)
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = grads()
    with SavedBytes(model):
        metered = grads()
    assert all(torch.equal(a, b) for a, b in zip(plain, metered, strict=True))


def test_double_backward():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def second():
        y = (x.exp() * x.tanh() * torch.sigmoid(x)).sum()  # saves inputs and outputs
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second()
    with SavedBytes() as meter:
        actual = second()
    assert meter.peak_bytes > 0
    assert torch.equal(actual, expected)
    with SavedBytes():
        assert torch.autograd.gradgradcheck(lambda v: v.exp() * v.tanh(), x)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class _DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors[0].shape == grad.shape
        return 2 * grad


@pytest.mark.parametrize(
    'op', [torch.exp_, torch.sigmoid_, torch.relu_, torch.tanh_, _DoubleInPlace.apply]
)
def test_operations_that_save_their_in_place_result(op):
    x = torch.randn(9, requires_grad=True)
    (expected,) = torch.autograd.grad(op(x * 1.0).sum(), x)
    with SavedBytes() as meter:
        y = op(x * 1.0)
        assert meter.live_bytes == 36
        (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(actual, expected)
    assert meter.live_bytes == 0


@pytest.mark.parametrize('op', [torch.exp, _Square.apply])
def test_modified_in_place_is_still_an_error(op):
    x = torch.randn(9, requires_grad=True)
    with SavedBytes():
        source = x * 1.0
        y = op(source)
        with torch.no_grad():
            (y if op is torch.exp else source).add_(1.0)
        with pytest.raises(RuntimeError, match=r'modified by an inplace operation.*version 0'):
            y.sum().backward()


def test_custom_function_that_saves_is_counted():
    x = torch.randn(9, requires_grad=True)
    assert _kept(lambda: _Square.apply(x)) == 36


# ------------------------------------------------------------------ other kinds of tensors


def test_sparse_counts_indices_and_values():
    matrix = torch.eye(4).to_sparse().requires_grad_()  # 4 values, 2 x 4 int64 indices
    dense = torch.randn(4, 5)
    kept = _kept(lambda: torch.sparse.mm(matrix, dense))
    assert kept == 4 * 5 * F32 + 4 * F32 + 2 * 4 * 8


def test_sparse_csr_counts_its_three_parts():
    rows, columns = torch.arange(5), torch.arange(4)
    matrix = torch.sparse_csr_tensor(rows, columns, torch.ones(4), (4, 4))
    dense = torch.randn(4, 5, requires_grad=True)
    assert _kept(lambda: matrix @ dense) == 4 * F32 + (5 + 4) * 8


def test_meta_and_fake_tensors_count_as_if_real():
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = nn.Linear(8, 16, device='meta')
    x = torch.empty(5, 8, device='meta')
    assert _kept(lambda: F.gelu(layer(x)), layer) == (5 * 8 + 5 * 16) * F32
    with FakeTensorMode():
        layer, x = nn.Linear(8, 16), torch.empty(5, 8)
        assert _kept(lambda: F.gelu(layer(x)), layer) == (5 * 8 + 5 * 16) * F32


def test_zero_size():
    layer, x = nn.Linear(8, 16), torch.empty(0, 8)
    with SavedBytes(layer) as meter:
        layer(x).sum().backward()
    assert meter.peak_bytes == 0
    assert torch.equal(layer.weight.grad, torch.zeros(16, 8))


def test_wrapper_subclass_counts_what_it_wraps():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ['inner'], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            unwrap = [a.inner if isinstance(a, Wrapper) else a for a in args]
            return Wrapper(func(*unwrap, **(kwargs or {})))

    x = Wrapper(torch.randn(10)).requires_grad_()
    assert _kept(lambda: torch.exp(x)) == 40


# ------------------------------------------------------------------ other hooks


def _chain(blocks, x, **options):
    for block in blocks:
        x = checkpoint(block, x, **options) if options else block(x)
    return x.sum()


@pytest.mark.parametrize(
    ('use_reentrant', 'early_stop'), [(False, True), (False, False), (True, True)]
)
def test_checkpointing_keeps_inputs_and_one_recomputed_block(use_reentrant, early_stop):
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)
    )
    x = torch.randn(8, 16, requires_grad=True)
    block_input, inside = 8 * 16 * F32, 2 * 8 * 64 * F32
    plain = saved_bytes(lambda: _chain(blocks, x).backward(), blocks)
    assert plain == 6 * (block_input + inside)
    with SavedBytes(blocks) as meter, set_checkpoint_early_stop(early_stop):
        loss = _chain(blocks, x, use_reentrant=use_reentrant)
        assert meter.live_bytes == 6 * block_input
        loss.backward()
    # what is recomputed in backward is kept too
    assert meter.peak_bytes == 6 * block_input + inside
    assert meter.live_bytes == 0


def test_hooks_inside_a_meter_act_and_are_counted_by_what_they_keep():
    """Hooks that keep a half-precision copy: half the bytes, and their gradient."""
    x = torch.randn(100, requires_grad=True)
    half = saved_tensors_hooks(lambda t: {'copy': t.detach().half()}, lambda p: p['copy'].float())
    with SavedBytes() as meter:
        with half:
            y = x.exp()
        z = y.sigmoid()
        assert meter.live_bytes == 100 * 2 + 100 * F32
        z.sum().backward()
    s = z.detach()
    torch.testing.assert_close(x.grad, s * (1 - s) * y.detach().half().float(), rtol=1e-6, atol=0)
    del y, z
    assert meter.live_bytes == 0


def test_hooks_around_a_meter_still_act():
    x = torch.randn(100, requires_grad=True)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().half()

    with saved_tensors_hooks(pack, lambda p: p.float()), SavedBytes() as meter:
        y = x.exp()
        assert meter.live_bytes == 200
        with SavedBytes() as inner:
            x.exp()
    assert len(packed) == 2
    assert inner.total_bytes == 200
    y.sum().backward()
    assert torch.equal(x.grad, y.detach().half().float())


def test_meters_above_and_below_other_hooks():
    x, alone = torch.randn(100, requires_grad=True), saved_tensors_hooks.__enter__
    with SavedBytes() as outer:
        with saved_tensors_hooks(lambda t: t.detach().half(), lambda p: p.float()):
            with SavedBytes() as inner:
                y = x.exp()
            z = x.exp()
        assert (outer.live_bytes, inner.live_bytes) == (400, 200)
        del y
        assert (outer.live_bytes, inner.live_bytes) == (200, 0)
    del z
    assert outer.live_bytes == 0
    assert saved_tensors_hooks.__enter__ is alone


def test_only_the_own_thread_is_counted():
    x = torch.randn(100, requires_grad=True)

    def elsewhere():
        with saved_tensors_hooks(lambda t: t.detach().half(), lambda p: p.float()):
            graphs.append(x.exp())
        graphs.append(x.exp())
        with SavedBytes() as other:
            graphs.append(x.exp())
        assert other.total_bytes == 400

    graphs = []
    with SavedBytes() as meter:
        y = x.exp()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(elsewhere).result()
    assert len(graphs) == 3
    assert meter.total_bytes == y.nbytes


def test_save_on_cpu_copies_are_counted():
    x = torch.randn(100, requires_grad=True)
    with SavedBytes() as meter, save_on_cpu():
        y = x.exp()
        assert meter.live_bytes == 400
        y.sum().backward()
    assert torch.equal(x.grad, y.detach())


# ------------------------------------------------------------------ hidden on ctx


class _Hider(torch.autograd.Function):
    """Keeps an index list and a mask where saved-tensor hooks do not see them."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.index = torch.arange(x.numel(), dtype=torch.int32)
        ctx.more = {'mask': [x > 0], 'name': 'mask'}
        ctx.same = x
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_hidden_bytes_finds_what_hooks_do_not_see():
    x = torch.randn(100, requires_grad=True)
    with SavedBytes() as meter:
        loss = (_Hider.apply(x.exp()) + _Hider.apply(x)).sum()
    assert meter.live_bytes == 2 * 400  # the output of exp, x
    assert meter.hidden_bytes(loss) == 2 * (400 + 100)  # index, mask
    assert hidden_bytes(loss) == 2 * (400 + 100) + 2 * 400  # it does not know what is counted
    assert hidden_bytes([loss, loss], x) == 2 * (400 + 100) + 400
    assert hidden_bytes(x) == 0
    loss.backward()
    assert meter.hidden_bytes(loss) == 2 * (400 + 100) + 2 * 400  # live with the graph


def test_hidden_bytes_walks_deep_graphs_and_leaves_out_the_model():
    weight = nn.Parameter(torch.randn(10))

    class Holder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.w = w
            return x + w

        @staticmethod
        def backward(ctx, grad):
            return grad, grad

    x = torch.randn(10, requires_grad=True)
    for _ in range(3000):  # deeper than Python's recursion limit
        x = Holder.apply(x, weight)
    assert hidden_bytes(x) == 40
    assert hidden_bytes(x, weight) == 0


# ------------------------------------------------------------------ no leak


@pytest.mark.parametrize('backward', [True, False])
def test_saved_tensors_die_with_their_graph(backward):
    """Without the collector's help: a cycle through autograd is one that it cannot see."""
    x = torch.randn(10, requires_grad=True)
    gc.disable()
    try:
        with SavedBytes() as meter:
            y = x.exp().sigmoid()  # both save their own output
            result = weakref.ref(y.untyped_storage())
            middle = weakref.ref(y.grad_fn.next_functions[0][0]._saved_result.untyped_storage())
            if backward:
                y.sum().backward()
            assert result() is not None
            del y
            assert result() is None and middle() is None
        assert meter.live_bytes == 0
    finally:
        gc.enable()


def test_the_meter_itself_is_released():
    x = torch.randn(10, requires_grad=True)
    model = nn.Linear(2, 2)
    meter = SavedBytes(model)
    with meter:
        y = x.exp()
    ref, held = weakref.ref(meter), weakref.ref(model.weight)
    del meter, model
    assert ref() is None and held() is None  # the graph that is left holds neither
    y.sum().backward()


def test_freed_in_another_thread():
    import threading

    x = torch.randn(10, requires_grad=True)
    with SavedBytes() as meter:
        graphs = [x.exp() for _ in range(200)]
        thread = threading.Thread(target=graphs.clear)
        thread.start()
        for _ in range(200):
            x.exp()
        thread.join()
        assert meter.live_bytes == 0
        assert meter.total_bytes == 400 * 40


def _sharded_bytes(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh('cpu', (world_size,))
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]).requires_grad_()
    return _kept(lambda: x.exp())


def test_of_a_sharded_tensor_this_ranks_part_counts():
    assert run_ranks(2, _sharded_bytes) == [4 * 4 * F32] * 2
