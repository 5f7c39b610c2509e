"""What torch keeps private, one test for each use: a failure says what a new torch has changed."""

import copy
import functools
import inspect
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import active_children

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import sdpa_flop_count

from memengine._torch_private import (
    allocator,
    attention,
    autograd,
    data_loading,
    distributed,
    fake,
    fake_operators,
    grad_scaler,
    matrix_products,
    modules,
    ops,
)
from memengine.techniques.compression.backward_needs import _NEEDS, IN_PLACE_FORMS, operation_name
from tests.marks import NEEDS_SHARDING

ADD = torch.ops.aten.add.Tensor


def relies_on(what):
    """Names, in the message of a test that fails, what torch did and who needs it."""

    def decorate(test):
        @functools.wraps(test)
        def named(*args, **kwargs):
            try:
                return test(*args, **kwargs)
            except Exception as error:
                raise AssertionError(
                    f'torch {torch.__version__} no longer {what}: memengine._torch_private relies '
                    f'on it ({type(error).__name__}: {error})'
                ) from error

        return named

    return decorate


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


# --- autograd: tensors ---


@relies_on('counts writes into a tensor in _version')
def test_version_of():
    x = torch.zeros(2)
    assert autograd.version_of(x) == 0
    x[0] = 1
    assert autograd.version_of(x) == autograd.version_of(x.detach()) == 1
    autograd.check_unmodified(x, 1)
    with pytest.raises(RuntimeError, match='at version 1; expected version 0'):
        autograd.check_unmodified(x, 0)


@relies_on('leaves the version where .data is given another memory')
def test_check_of_later_writes():
    x = torch.zeros(2, 3, requires_grad=True).exp()
    memory = weakref.ref(x.untyped_storage())
    checks = [autograd.check_of_later_writes(each) for each in (x, x[0], x[0, 0])]
    for check in checks:
        check()
    with torch.no_grad():
        x.view(6)[3:].zero_()
    del x
    assert memory() is None
    for check, shape in zip(checks, (r'\(2, 3\)', r'\(3,\)', r'\(\)'), strict=True):
        with pytest.raises(RuntimeError, match=f'of shape {shape} is at version 1; expected'):
            check()


@relies_on('names in _base what a tensor is a view of')
def test_base_of():
    x = torch.zeros(2, 2)
    assert autograd.base_of(x) is None
    assert autograd.base_of(x[0][:1]) is x


@pytest.mark.parametrize('device', ['cpu', 'meta'])
@relies_on('tells storages apart by _cdata, on any device')
def test_storage_key(device):
    x, y = torch.zeros(2, device=device), torch.zeros(2, device=device)
    key, other = (autograd.storage_key(t.untyped_storage()) for t in (x, y))
    assert key != other
    assert autograd.storage_key(x[1:].untyped_storage()) == key


@relies_on("keeps a tensor's hooks in _backward_hooks")
def test_gradient_hooks_of():
    x = leaf(2).exp()
    assert not autograd.gradient_hooks_of(x)
    x.register_hook(print)
    assert len(autograd.gradient_hooks_of(x)) == 1


@relies_on('tells of the transforms of torch.func that are in force')
def test_functorch():
    seen = []

    def look(x):
        seen.append((autograd.is_functorch_tensor(x), autograd.is_under_functorch()))
        return x.sum()

    look(torch.zeros(2))
    torch.func.grad(look)(torch.zeros(2))
    assert seen == [(False, False), (True, True)]


@relies_on('tells whether tensors may have tangents')
def test_forward_ad():
    assert not autograd.is_under_forward_ad()
    with torch.autograd.forward_ad.dual_level():
        assert autograd.is_under_forward_ad()
    assert not autograd.is_under_forward_ad()


@relies_on('tells tensors of other devices, layouts and kinds by their dispatch keys')
def test_dispatch_keys():
    plain = torch.zeros(2, 2)
    same = (torch.ones(3), plain.t(), nn.Parameter(plain)[0].mul(2), plain.to(torch.int8))
    of_graph = {autograd.dispatch_keys(tensor) for tensor in (plain, *same)}
    numbers = torch.zeros(2, dtype=torch.complex64)
    others = [plain.to('meta'), plain.to_sparse(), plain.to_sparse_csr()]
    others += [numbers.conj(), numbers.conj().imag]
    torch.func.vmap(lambda row: others.append(row) or row)(plain)
    keys = {autograd.dispatch_keys(tensor) for tensor in others}
    assert len(of_graph) == 1 and len(keys) == len(others) and not keys & of_graph


# --- autograd: nodes ---


@relies_on('numbers its nodes in the order in which they are made, and saves right after')
def test_node_numbers():
    saving = []

    def pack(tensor):
        saving.append(autograd.next_node_number() - 1)
        return tensor

    x = leaf(2)
    with saved_tensors_hooks(pack, lambda t: t):
        y = x.exp()
        z = y.sin()
    assert saving == [autograd.node_number(t.grad_fn) for t in (y, z)]
    assert saving[1] == saving[0] + 1
    assert autograd.node_number(y.grad_fn.next_functions[0][0]) > 2**60  # a leaf


@relies_on('makes the node of an operation before it is carried out, and tells whose backward runs')
def test_nodes_of_what_is_carried_out():
    class Places(ops.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = autograd.current_node()
            forward = autograd.next_node_number() - 1
            seen.append(forward if node is None else autograd.node_number(node))
            return func(*args, **(kwargs or {}))

    seen, x = [], leaf(2)
    with Places():
        y = x.exp()
        z = y.sin()
        numbers = [autograd.node_number(t.grad_fn) for t in (y, z)]
        assert list(dict.fromkeys(seen)) == numbers
        seen.clear()
        z.backward(torch.ones(2))
    in_order = [number for number in dict.fromkeys(seen) if number in numbers]
    assert in_order == numbers[::-1]


@relies_on('makes a copy, by the node that comes next, of what an operation in place saves')
def test_numbers_in_place():
    saving = []

    def pack(tensor):
        saving.append(autograd.next_node_number() - 1)
        return tensor

    x = leaf(2) * 1
    with saved_tensors_hooks(pack, lambda t: t):
        y = F.silu(x, inplace=True)
    assert operation_name(y.grad_fn) in IN_PLACE_FORMS
    number = autograd.node_number(y.grad_fn)
    assert saving and set(saving) <= {number, number + 1}


@relies_on('shows what a node has saved as _saved_<field>, until backward frees it')
def test_saved_by():
    y = leaf(2).exp()
    assert autograd.has_saved(y.grad_fn, 'result')
    assert not autograd.has_saved(y.grad_fn, 'nonsense')
    assert torch.equal(autograd.saved_by(y.grad_fn, 'result'), y)
    y.sum().backward()
    with pytest.raises(RuntimeError):
        autograd.saved_by(y.grad_fn, 'result')


@relies_on("knows a result's shape, dtype and device in _input_metadata")
def test_result_of():
    result = autograd.result_metadata_of(leaf(2, 3).double().grad_fn)
    assert tuple(result.shape) == (2, 3)
    assert result.dtype == torch.float64 and result.device.type == 'cpu'
    given = autograd.input_metadata_of(leaf(2, 3, 4).unbind()[1].exp().grad_fn)
    assert tuple(given.shape) == (3, 4)


IMAGE, VOLUME = (2, 4, 8, 8), (2, 4, 8, 8, 8)
NODES = {  # by the operations that backward_needs.py knows
    'Addmm': lambda: F.linear(leaf(2, 3), leaf(5, 3), leaf(5)),
    'Mm': lambda: leaf(2, 3) @ leaf(3, 5),
    'Convolution': lambda: F.conv2d(leaf(*IMAGE), leaf(4, 4, 3, 3)),
    'Bmm': lambda: torch.bmm(leaf(2, 3, 4), leaf(2, 4, 5)),
    'Baddbmm': lambda: torch.baddbmm(leaf(2, 3, 5), leaf(2, 3, 4), leaf(2, 4, 5)),
    'ScaledDotProductFlashAttentionForCpu': lambda: F.scaled_dot_product_attention(
        leaf(1, 2, 4, 8), leaf(1, 2, 4, 8), leaf(1, 2, 4, 8)
    ),
    'Softmax': lambda: leaf(2, 3).softmax(-1),
    'SafeSoftmax': lambda: torch.ops.aten._safe_softmax(leaf(2, 3), -1),
    'NativeLayerNorm': lambda: F.layer_norm(leaf(2, 3), (3,)),
    'NativeGroupNorm': lambda: F.group_norm(leaf(*IMAGE), 2),
    'NativeBatchNorm': lambda: F.batch_norm(leaf(*IMAGE), None, None, training=True),
    'Gelu': lambda: F.gelu(leaf(2)),
    'Silu': lambda: F.silu(leaf(2)),
    'Mish': lambda: F.mish(leaf(2)),
    'Elu': lambda: F.elu(leaf(2)),
    'Celu': lambda: F.celu(leaf(2)),
    'Softplus': lambda: F.softplus(leaf(2)),
    'Hardswish': lambda: F.hardswish(leaf(2)),
    'Hardsigmoid': lambda: F.hardsigmoid(leaf(2)),
    'LogSigmoid': lambda: F.logsigmoid(leaf(2)),
    'Tanh': lambda: leaf(2).tanh(),
    'Sigmoid': lambda: leaf(2).sigmoid(),
    'Mul': lambda: leaf(2) * leaf(2),
    'Relu': lambda: leaf(2).relu(),
    'LeakyRelu': lambda: F.leaky_relu(leaf(2)),
    'Hardtanh': lambda: F.hardtanh(leaf(2)),
    'NativeDropout': lambda: torch.native_dropout(leaf(2), 0.5, True)[0],
    'MaskedFill': lambda: leaf(2).masked_fill(torch.tensor([True, False]), 0.0),
    'MaxPool2DWithIndices': lambda: F.max_pool2d(leaf(*IMAGE), 2),
    'MaxPool3DWithIndices': lambda: F.max_pool3d(leaf(*VOLUME), 2),
    'AdaptiveMaxPool2D': lambda: F.adaptive_max_pool2d(leaf(*IMAGE), 2),
    'AdaptiveMaxPool3D': lambda: F.adaptive_max_pool3d(leaf(*VOLUME), 2),
    'AvgPool2D': lambda: F.avg_pool2d(leaf(*IMAGE), 2),
    'AvgPool3D': lambda: F.avg_pool3d(leaf(*VOLUME), 2),
    'AdaptiveAvgPool2D': lambda: F.adaptive_avg_pool2d(leaf(*IMAGE), 2),
    'AdaptiveAvgPool3D': lambda: F.adaptive_avg_pool3d(leaf(*VOLUME), 2),
    'Embedding': lambda: F.embedding(torch.zeros(2, dtype=torch.long), leaf(3, 4)),
}
OF_OTHER_DEVICES = {  # or of backends that are not there
    'Linear',
    'ScaledDotProductFlashAttention',
    'ScaledDotProductEfficientAttention',
    'ScaledDotProductCudnnAttention',
    'CudnnBatchNorm',
    'MiopenBatchNorm',
    'FusedRmsNorm',
}
OF_OTHER_FORMS = {  # in place, or of other devices
    ('Elu', 'result'),
    ('Celu', 'result'),
    ('LeakyRelu', 'result'),
    ('ScaledDotProductFlashAttentionForCpu', 'out'),
}


def test_every_operation_of_the_table_has_a_test():
    assert NODES.keys() | OF_OTHER_DEVICES == _NEEDS.keys()


@pytest.mark.parametrize('name', NODES)
@relies_on('names this operation and its fields as it did')
def test_nodes(name):
    node = NODES[name]().grad_fn
    assert operation_name(node) == name, f'the node is {node.name()}'
    for field in _NEEDS[name]:
        assert autograd.has_saved(node, field) or (name, field) in OF_OTHER_FORMS, field


# --- autograd: backward passes and hooks ---


@relies_on('numbers backward passes, and calls at their end what was queued')
def test_backward_passes():
    seen = []

    def look(grad):
        seen.append(autograd.current_backward())
        autograd.after_backward(lambda: seen.append('end'))

    for _ in range(2):
        x = leaf(2)
        y = x.exp()
        y.register_hook(look)
        y.sum().backward()
    assert autograd.current_backward() == -1
    assert seen[1] == seen[3] == 'end' and -1 not in seen and seen[0] != seen[2]


def same(tensor):
    return tensor


def as_saved(tensor):
    return tensor


@relies_on('tells which saved-tensor hooks are in force, by thread and in backward')
def test_hooks_in_force():
    assert autograd.saved_tensor_hooks_in_force() is None
    with saved_tensors_hooks(print, print), saved_tensors_hooks(same, as_saved):
        assert autograd.saved_tensor_hooks_in_force() == (same, as_saved)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(autograd.saved_tensor_hooks_in_force).result() is None
        seen = []
        y = leaf(2).exp()
        y.register_hook(lambda grad: seen.append(autograd.saved_tensor_hooks_in_force()))
        y.sum().backward()
    assert seen == [(same, as_saved)]
    assert autograd.saved_tensor_hooks_in_force() is None


@relies_on('defines the hooks of checkpointing in torch.utils.checkpoint')
def test_is_checkpointing():
    seen = []

    def forward(x):
        seen.append(autograd.is_checkpointing())
        return x.exp().sin()

    forward(leaf(2))
    checkpoint(forward, leaf(2), use_reentrant=False).sum().backward()
    assert seen == [False, True, True]


def test_hooks_noted_for_a_torch_that_does_not_tell(monkeypatch):
    monkeypatch.setattr(saved_tensors_hooks, '__enter__', saved_tensors_hooks.__enter__)
    monkeypatch.setattr(saved_tensors_hooks, '__exit__', saved_tensors_hooks.__exit__)
    hooks = saved_tensors_hooks(same, as_saved)
    with hooks:  # that nobody has noted: they were entered before
        noted = autograd._EnteredHooks()
    assert noted(False) is None
    with hooks, saved_tensors_hooks(print, print):
        assert noted(False) == (print, print)
        thread = ThreadPoolExecutor(1)
        assert thread.submit(noted, False).result() is None
        monkeypatch.setattr(autograd, 'current_backward', lambda: 0)
        assert thread.submit(noted, False).result() == (print, print)  # as on a GPU
    assert noted(False) is None


# --- operators ---


class Seen(ops.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


@relies_on("has an operator's arguments, and which of them it writes into, in its _schema")
def test_schemas():
    x, y = torch.zeros(2), torch.zeros(2)
    with Seen() as seen:
        x.add_(y, alpha=2)
        torch.add(x, y)
    (in_place, args, kwargs), (plain, *_) = seen.calls
    assert isinstance(in_place, ops.OpOverload)
    assert isinstance(in_place.overloadpacket, ops.OpOverloadPacket)
    assert in_place.overloadpacket.__name__ == 'add_'
    assert ops.argument_names(in_place) == ['self', 'other', 'alpha']
    assert [t is x for t in ops.written_arguments(in_place, args, kwargs)] == [True]
    assert ops.written_arguments(plain, args, kwargs) == []
    assert ops.written_arguments(torch.ops.c10d.allreduce_.default, ([x], None), {}) == [[x]]
    assert ops.written_arguments(torch.ops.c10d.send.default, ([x], None), {}) == []


@relies_on('has norms, products, averages and copies of many tensors')
def test_foreach():
    x, y = [torch.tensor([3.0, 4.0])], [torch.tensor([5.0, 4.0])]
    assert ops.foreach_norm(x, 2.0)[0] == 5
    ops.foreach_mul_(x, [torch.tensor(2.0)])
    ops.foreach_lerp_(x, y, 0.5)
    assert x[0].tolist() == [5.5, 6.0]
    copies = [torch.zeros(2), torch.tensor(0)]
    ops.foreach_copy_(copies, [x[0], torch.tensor(3)])
    assert copies[0].tolist() == [5.5, 6.0]
    assert copies[1] == 3


@relies_on('gives output and log-sum-exp of fused attention as its nodes save them')
@pytest.mark.parametrize('options', [{}, dict(is_causal=True), dict(attn_mask=torch.ones(5, 5))])
def test_fused_attention(options):
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    node = F.scaled_dot_product_attention(q, k, v, scale=0.5, **options).grad_fn
    form = attention.FUSED_ATTENTION[operation_name(node)]
    mask = [m for m in [autograd.saved_by(node, form.mask)] if m is not None]
    settings = {name: autograd.saved_by(node, name) for name in ('is_causal', 'scale')}
    output, log_sum, *_ = form.attend(q, k, v, *mask, **settings)
    assert torch.equal(output, autograd.saved_by(node, 'output'))
    assert torch.equal(log_sum, autograd.saved_by(node, form.log_sum))


@relies_on('says what the processor multiplies, and has the backward of attention on it')
def test_of_the_processor():
    assert ops.cpu_multiplies_bfloat16() in (True, False)
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    result = F.scaled_dot_product_attention(q, k, v).sum()
    with Seen() as seen:
        result.backward()
    args = next(args for func, args, _ in seen.calls if func is attention.CPU_ATTENTION_BACKWARD)
    for given, expected in zip(args[1:4], (q, k, v), strict=True):
        assert torch.equal(given, expected)


@relies_on('has fused attention for GPUs with these fields and arguments')
@pytest.mark.parametrize('name', attention.FUSED_ATTENTION)
def test_fields_of_fused_attention(name):
    form, kind = attention.FUSED_ATTENTION[name], getattr(torch._C._functions, f'{name}Backward0')
    has = [hasattr(kind, f'_saved_{field}') for field in ('attn_mask', 'attn_bias', 'output')]
    assert has == [form.mask == 'attn_mask', form.mask == 'attn_bias', True]
    for field in ('query', 'key', 'value', 'is_causal', 'scale', 'dropout_p', form.log_sum):
        assert hasattr(kind, f'_saved_{field}'), field
    words = re.findall('[A-Z][a-z]+', name)
    op = getattr(torch.ops.aten, f'_{"_".join(words).lower()}').default
    arguments = ops.argument_names(op)
    assert {'is_causal', 'scale'} <= {*arguments}
    assert [result.name for result in op._schema.returns][:2] == ['output', form.log_sum]


@relies_on('has RMSNorm as one operator, that gives the result first')
def test_fused_rms_norm():
    x, weight = torch.randn(2, 4), torch.randn(4)
    if not ops.HAS_FUSED_RMS_NORM:
        pytest.skip('this torch has no fused RMSNorm, so that no node is of that kind')
    expected = F.rms_norm(x, (4,), weight, 1e-3)
    torch.testing.assert_close(ops.fused_rms_norm(x, [4], weight, 1e-3), expected)


@relies_on('runs and prices products, convolutions and attention as these operators')
def test_flops():
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    with Seen() as seen:
        attended = F.scaled_dot_product_attention(query, key, value)
    ((attention, args, kwargs),) = [call for call in seen.calls if 'attention' in str(call[0])]
    flops = ops.FLOPS_OF[attention.overloadpacket](*args, **kwargs, out_val=attended)
    assert flops == sdpa_flop_count(query.shape, key.shape, value.shape) == 2 * 2 * 6 * 5 * 7 * 8
    for packet in ('mm', 'addmm', 'bmm', 'baddbmm', 'convolution'):
        assert getattr(torch.ops.aten, packet) in ops.FLOPS_OF, packet
    image, weight = torch.randn(2, 6, 5, 5), torch.randn(6, 1, 3, 3, requires_grad=True)
    with Seen() as seen:
        F.conv2d(image, weight, padding=1, groups=6).sum().backward()
    priced = [call for call in seen.calls if 'convolution' in str(call[0])]
    for op, args, kwargs in priced:  # only the weight wants a gradient
        flops = ops.FLOPS_OF[op.overloadpacket](*args, **kwargs, out_val=op(*args, **kwargs))
        assert flops == 2 * 2 * 6 * 5 * 5 * 3 * 3
    assert len(priced) == 2
    mine = ops._attention_flops(query, key, value[..., :4], is_causal=True)
    assert mine == sdpa_flop_count(query.shape, key.shape, value[..., :4].shape)


@relies_on('lets a sparse tensor be taken apart without coalescing it')
def test_parts_of_sparse():
    dense = torch.eye(4)
    twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (4,))
    assert not twice.is_coalesced()
    assert ops.parts_of_sparse(dense) == ()
    for tensor, count in ((twice, 2), (dense.to_sparse_csr(), 3), (dense.to_sparse_csc(), 3)):
        parts = ops.parts_of_sparse(tensor)
        assert len(parts) == count
        assert all(part.layout == torch.strided for part in parts)
    assert ops.parts_of_sparse(twice)[1].tolist() == [1, 2]


@relies_on('flattens trees of containers')
def test_pytree():
    leaves, structure = ops.pytree.tree_flatten({'a': [1, (2, None)]})
    assert ops.pytree.tree_unflatten(leaves, structure) == {'a': [1, (2, None)]}
    assert ops.pytree.tree_leaves([1, {'b': 2}]) == [1, 2]


@relies_on('knows tensor subclasses that consist of tensors')
def test_wrapper_subclasses():
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.zeros(2)
    assert ops.is_traceable_wrapper_subclass(TwoTensor(x, x.clone()))
    assert not ops.is_traceable_wrapper_subclass(x)


@relies_on('writes into buffers as often as memengine thinks, in a compiled checkpoint')
def test_compiled_checkpoints():
    torch._dynamo.reset()
    norm = nn.BatchNorm1d(4)

    @torch.compile(backend='aot_eager')
    def run(x):
        return checkpoint(lambda x: norm(x).sin(), x, use_reentrant=False)

    run(leaf(8, 4)).sum().backward()
    assert norm.num_batches_tracked == (2 if ops.compiled_checkpoints_write_twice() else 1)


@relies_on('has a setting by which checkpointed, compiled parts have no generators of their own')
def test_draw_from_known_generators_when_compiled():
    from torch._functorch import config, partitioners

    ops.draw_from_known_generators_when_compiled()
    if hasattr(partitioners, 'apply_graphsafe_rng_functionalization'):  # since 2.7
        assert config.graphsafe_rng_functionalization is False


@relies_on('keeps compilers away from a function without importing dynamo before it is called')
@pytest.mark.parametrize('options', [{}, dict(recursive=False)])
def test_do_not_compile(options):
    seen = []

    @ops.do_not_compile(**options)
    def eager(x):
        seen.append(torch.compiler.is_compiling())
        return x.sin()

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: eager(x).cos(), backend='eager')
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin().cos())
    assert seen == [False]


@relies_on('keeps compilers away from a function without importing dynamo before it is called')
def test_do_not_compile_imports_no_compiler():
    code = """
import sys
from memengine._torch_private.ops import do_not_compile
do_not_compile(print)
print('torch._dynamo' in sys.modules)
"""
    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == 'False'


# --- modules and optimisers ---


@relies_on("keeps a module's tensors and hooks in tables")
def test_tables_of_modules():
    norm = nn.BatchNorm2d(2)
    assert list(modules.own_parameters(norm)) == ['weight', 'bias']
    assert list(modules.own_buffers(norm)) == ['running_mean', 'running_var', 'num_batches_tracked']
    modules.own_buffers(norm)['running_mean'] = None
    assert norm.running_mean is None
    assert list(modules.own_modules(nn.Sequential(norm))) == ['0']
    norm.register_forward_hook(print)
    norm.register_forward_pre_hook(print)
    assert len(modules.forward_hooks_of(norm)) == len(modules.forward_pre_hooks_of(norm)) == 1


@relies_on('says what a module of TorchScript holds')
@pytest.mark.filterwarnings('ignore:.*torch.jit')
def test_attributes_of_scripted_modules():
    scripted = torch.jit.script(nn.BatchNorm1d(2))
    held = {'weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked', 'training'}
    assert held <= {*modules.scripted_attributes(scripted)}
    assert not isinstance(modules.own_buffers(scripted), dict)


@relies_on('has these bases of its layers')
def test_bases_of_layers():
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, modules.BatchNorm)
        assert issubclass(kind, modules.BatchOrInstanceNorm)
    assert issubclass(nn.InstanceNorm2d, modules.InstanceNorm)
    assert issubclass(nn.InstanceNorm2d, modules.BatchOrInstanceNorm)
    assert not issubclass(nn.InstanceNorm2d, modules.BatchNorm)
    assert issubclass(nn.ConvTranspose2d, modules.Convolution)


@relies_on('notes in a module that it was compiled')
def test_compiled_modules():
    layer = nn.Linear(2, 2)
    assert not modules.is_compiled(layer)
    assert modules.is_compiled(torch.compile(layer, backend='eager'))
    layer.compile(backend='eager')
    assert modules.is_compiled(layer)
    with modules.without_compilation([layer]):
        assert not modules.is_compiled(layer)
    assert modules.is_compiled(layer)
    modules.forget_compilation(layer)
    assert not modules.is_compiled(layer)
    assert layer(torch.zeros(1, 2)).shape == (1, 2)


@relies_on("lists the options of its compiler's modes in torch._inductor")
def test_options_of_modes():
    assert modules.options_of_mode(None, None) == modules.options_of_mode('default', None) == {}
    assert modules.options_of_mode('max-autotune', None)['max_autotune']


@relies_on("keeps an optimiser's hooks in _optimizer_step_post_hooks")
def test_step_hooks():
    calls = []
    optimizer = torch.optim.SGD([leaf(2)], lr=0.1)
    optimizer.register_step_post_hook(lambda *args: calls.append(1))
    with modules.without_step_hooks(optimizer):
        optimizer.step()
    assert not calls
    optimizer.step()
    assert calls == [1]


# --- distributed ---


@pytest.fixture
def group():
    with distributed.pretended_ranks(2):
        yield dist.group.WORLD


@pytest.fixture
def group_of_one():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    # Of 2.6 it holds Python's lock while it waits for gloo's threads, which may need that to let go
    # of the last collective: they have it before.
    time.sleep(0.1)
    dist.destroy_process_group()


@relies_on('tells through which store ranks have found each other')
def test_default_store(group_of_one):
    store = distributed.default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.HashStore)


@relies_on('finds process groups by name')
def test_process_groups(group):
    assert distributed.process_group_of(group) is group
    assert distributed.process_group_of(group.group_name).size() == 2
    assert distributed.process_group_of(group.boxed()).size() == 2


@relies_on('shows each collective to a context, in forward and in backward')
def test_collectives(group_of_one):
    seen = []

    @contextmanager
    def around():
        seen.append('before')
        yield
        seen.append('after')

    tensor = torch.ones(2)
    model = DistributedDataParallel(nn.Linear(2, 2))
    with distributed.around_collectives(around):
        dist.all_reduce(tensor)
        dist.all_gather([torch.empty(2)], tensor)
        assert seen == ['before', 'after'] * 2
        other = threading.Thread(target=dist.all_reduce, args=[tensor])
        other.start()
        other.join()
        assert seen == ['before', 'after'] * 2
        model(leaf(3, 2)).sum().backward()
        assert seen == ['before', 'after'] * 3
    dist.all_reduce(tensor)
    assert seen == ['before', 'after'] * 3


@relies_on('tells of how many parameters DDP reduces gradients')
def test_numbers_reduced(group):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    model = DistributedDataParallel(layers)
    layers[0].requires_grad_(True)
    assert distributed.numbers_reduced(model) == (4, 2)


@relies_on('has DDP begin anew after a backward that was broken off')
def test_reductions(group_of_one):
    model = DistributedDataParallel(nn.Linear(2, 2))

    def fail(gradient):
        raise ValueError('broken off')

    handle = model.module.weight.register_hook(fail)
    for _ in range(3):
        with pytest.raises(ValueError, match='broken off'):
            model(leaf(3, 2)).sum().backward()
        distributed.forget_reduction(model)
    handle.remove()
    model.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    assert torch.equal(model.module.bias.grad, torch.full((2,), 3.0))


@relies_on('shards on CPUs where memengine thinks that it does')
def test_sharding(group):
    mesh = dist.device_mesh.init_device_mesh('cpu', (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def shard():
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        distributed.mark_as_root(model)
        distributed.gather_on_compute_stream(model)
        model[0](leaf(2, 4))
        model(leaf(2, 4)).sum().backward()

    if distributed.CAN_SHARD_ON_CPU:
        shard()
        model.set_requires_gradient_sync(False)
        model(leaf(2, 4)).sum().backward()
        held = [holder.grad for holder in distributed.gradient_holders(model)]
        kinds = [type(gradient).__name__ for gradient in held if gradient is not None]
        assert sorted(kinds) == ['DTensor'] * 4 + ['Tensor'] * 4
    else:
        with pytest.raises(AttributeError):
            shard()


class Watching(ops.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.namespaces = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


class Unaware(Watching):
    """What gathering is hidden from."""


def on_two_meshes():
    """Biases on a mesh of their own, as experts have."""
    common = pytest.importorskip('torch.distributed.fsdp._fully_shard._fsdp_common')
    if not hasattr(common, 'ShardPlacementResult'):
        pytest.skip('this torch spreads the parameters of a part over one mesh')
    mesh = dist.device_mesh.DeviceMesh.from_group(dist.new_group([0, 1]), 'cpu')
    other = common.ShardPlacementResult(None, common.FSDPMeshInfo(mesh, 0))
    return lambda parameter: other if parameter.ndim == 1 else None


@NEEDS_SHARDING
@pytest.mark.parametrize('place', [lambda: None, on_two_meshes])
@relies_on('gathers and frees units by these methods')
def test_gather_unseen_by(group, place):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh, place = dist.device_mesh.init_device_mesh('cpu', (2,)), place()
    for part in (*model, model):
        fully_shard(part, mesh=mesh, shard_placement_fn=place)
    for _ in range(2):
        distributed.gather_unseen_by((Unaware,), model)
    with Watching() as aware, Unaware() as unaware:
        model(leaf(2, 4))
    assert {'fsdp', 'c10d'} <= aware.namespaces
    assert unaware.namespaces == {'aten'}


@relies_on("names in a sharded checkpoint's .metadata what it named")
def test_metadata(tmp_path):
    state = {'a': torch.zeros(2), 'b': torch.zeros(2, dtype=torch.bfloat16)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    named = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            named.add((module, name))
            return super().find_class(module, name)

    with open(tmp_path / '.metadata', 'rb') as file:
        Reader(file).load()
    unknown = {
        (module, name)
        for module, name in named - distributed.METADATA_RECORDS
        if not (module == 'torch' and isinstance(getattr(torch, name), torch.dtype))
    }
    assert named and not unknown


# --- data loading ---


@relies_on('keeps the processes of a loader in _iterator')
def test_end_workers():
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    for _ in range(2):  # a loader whose processes have ended starts others
        assert [int(x) for x in loader] == [0, 1, 2, 3]
        (process,) = active_children()
        data_loading.end_workers(loader)
        assert process.exitcode == 0, 'told, not killed'
    data_loading.end_workers(loader)


# ------------------------------------------------------------------ fake tensors


@relies_on('resizes storages by an attribute of their class, from sharding, too')
def test_resizes_of_storages():
    seen = []
    with fake.FakeTensorMode(), fake.resizes_noted(lambda storage, nbytes: seen.append(nbytes)):
        storage = torch.ones(4).untyped_storage()
        storage.resize_(0)
        storage.resize_(16)
    storage.resize_(0)
    assert seen == [0, 16]


@relies_on('asks the class of fake tensors how they are copied')
def test_deep_copies_of_fake_tensors():
    with fake.fake_mode(), fake.deep_copies():
        layer = nn.BatchNorm1d(4).requires_grad_(False)
        layer.bias = layer.weight
        copied = copy.deepcopy(layer)
        assert fake.is_fake(copied(torch.ones(2, 4)))
        assert copied.bias is copied.weight is not layer.weight
        assert type(copied.weight) is type(layer.weight)
        assert not copied.weight.requires_grad


@relies_on('casts modules by swapping tensors, and looks for weak references to them')
def test_modules_that_are_cast_without_memory():
    with fake.fake_mode(), fake.modules_cast_in_place():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        before = list(model.parameters())
        model.double()
        assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
        assert {parameter.dtype for parameter in before} == {torch.float64}
        assert fake.is_fake(model[1].weight)
    assert torch.utils.weakref is weakref


@relies_on('has a process group that sends nothing')
def test_pretended_ranks():
    with distributed.pretended_ranks(3):
        everything = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(everything, torch.ones(2))
        assert dist.get_world_size() == 3
    assert not dist.is_initialized()


@relies_on('has tensors without memory, below which modes see every operator')
def test_fake_tensors():
    with fake.FakeTensorMode():
        x = torch.ones(4)
        assert fake.is_fake(x)
        with fake.unset_fake_temporarily():
            assert not fake.is_fake(torch.ones(4))
        with pytest.raises(fake.FAKE_REFUSES):
            torch.nonzero(x)
    assert not fake.is_fake(torch.ones(4))
    with fake.fake_mode():
        storage = torch.ones(4).untyped_storage()
        is_held = weakref.ref(storage)
        torch.empty(0).set_(storage, 0, (2,), (1,))
        del storage
        assert is_held() is None
    seen = []

    class See(ops.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with See():
        torch.ones(1).item()
        assert seen[-1] is fake.READS_A_NUMBER
        torch.equal(torch.ones(1), torch.ones(1))
        assert seen[-1] is fake.COMPARES
        with tempfile.NamedTemporaryFile() as file:
            torch.from_file(file.name, shared=True, size=4, dtype=torch.uint8)
        assert seen[-1] is fake.MAPS_A_FILE


@relies_on('lets a mode go without the wrapper that keeps dynamo out')
def test_modes_of_operators():
    class Watching(ops.OperatorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    assert inspect.unwrap(Watching.__torch_dispatch__) is Watching.__torch_dispatch__
    with Watching():
        compiled = torch.compile(lambda x: (x + 1) * 2, backend='eager')
        assert compiled(torch.ones(2)).tolist() == [4, 4]
    assert ADD in seen


@relies_on('lets fake tensors be made of meta tensors, as their class does')
def test_fake_tensors_made_again():
    with fake.FakeTensorMode():
        x, y = torch.ones(3, 4), torch.ones(3, 4)
        kinds = []
        for other in (2, 2.0, True, y, y.t().contiguous().t()):
            inputs = []
            kinds.append(fake_operators.inputs_by_shape(ADD, (x, other), {}, inputs))
            assert inputs[0] is x
        assert len(set(kinds)) == len(kinds) and None not in kinds
        assert fake_operators.inputs_by_shape(torch.ops.aten.nonzero.default, (x,), {}, []) is None
        chunks = fake_operators.Results.of(x.unbind(), [x]).again([y])
        assert [type(chunk) for chunk in chunks] == [type(x)] * 3
        assert chunks[1].storage_offset() == 4
        key = autograd.storage_key
        assert key(chunks[1].untyped_storage()) == key(y.untyped_storage())
        total = fake_operators.Results.of(x + y, [x, y]).again([x, y])
        assert total.device.type == 'cpu' and fake.is_fake(total)
        assert total.untyped_storage().nbytes() == 48
        assert key(total.untyped_storage()) not in (
            key(x.untyped_storage()),
            key(y.untyped_storage()),
        )
        assert fake_operators.Results.of(7, [x]) is None
        assert (total * 2).shape == (3, 4)
        with fake.unset_fake_temporarily():
            real, empty = torch.tensor(3.0), torch.empty(0)
        inputs, detach = [], torch.ops.aten.detach.default
        lift = torch.ops.aten.lift_fresh.default
        assert fake_operators.inputs_by_shape(lift, (real,), {}, inputs) is not None
        assert fake_operators.inputs_by_shape(detach, (empty,), {}, inputs) is not None
        assert inputs[0] is real and inputs[1] is empty
        assert fake_operators.inputs_by_shape(detach, (real,), {}, []) is None
        made = lift(real)
        assert made.constant is not None  # which no other operator's results follow from
        assert fake_operators.inputs_by_shape(ADD, (made, 1), {}, []) is None
        assert fake_operators.Results.of(made, [real]).again([real]).constant is None


@relies_on('says by spec and local tensor all that a DTensor is')
def test_operators_of_dtensors_follow_from_their_first_results():
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    add = torch.ops.aten.add_.Tensor
    with ExitStack() as stack:
        stack.enter_context(distributed.pretended_ranks(2))
        mesh = init_device_mesh('cpu', (2,))
        stack.enter_context(fake.fake_mode())
        x, y, whole = (
            DTensor.from_local(torch.ones(4, 4), mesh, [place], run_check=False)
            for place in (Shard(0), Shard(0), Replicate())
        )
        kinds = [fake_operators.inputs_by_shape(add, (one, 1), {}, []) for one in (x, y, whole)]
        assert kinds[0] == kinds[1] != kinds[2] and None not in kinds
        in_place = fake_operators.Results.of(add(x, 1), [x])
        assert in_place.again([y]) is y
        assert fake_operators.Results.of(x + 1, [x]) is None


# --- products ---


@relies_on('multiplies half-precision matrices to fp32 by mm(left, right, dtype, out=)')
def test_half_mm():
    left, right = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    if matrix_products.HAS_OUT_DTYPE:  # on GPUs only, so without values
        room = torch.empty(3, 5, device='meta')
        torch.mm(left.to('meta'), right.to('meta'), torch.float32, out=room)
    with torch.autocast('cpu', torch.bfloat16):
        found = matrix_products.half_mm(left, right, torch.empty(3, 5))
    torch.testing.assert_close(found, (left.double() @ right.double()).float())


@relies_on('has a switch of TF32 that can be put back')
def test_fp32_products():
    before = torch.get_float32_matmul_precision()
    for was in ('highest', 'high'):
        torch.set_float32_matmul_precision(was)
        for kind in ('ieee', 'tf32'):
            with matrix_products.fp32_products(kind):
                pass
            assert torch.get_float32_matmul_precision() == was
    torch.set_float32_matmul_precision(before)


# --- the allocator of a GPU ---


@relies_on("records a GPU's allocations with Python's frames, and writes them to a file")
def test_record_of_allocations(monkeypatch, tmp_path):
    done = []

    def noted(name):
        taken = inspect.signature(getattr(torch.cuda.memory, name))
        return lambda *args, **kwargs: done.append(taken.bind(*args, **kwargs).arguments)

    for name in ('_record_memory_history', '_dump_snapshot'):
        monkeypatch.setattr(torch.cuda.memory, name, noted(name))
    with allocator.allocations_recorded(tmp_path / 'snapshot.pickle'):
        assert len(done) == 1 and done[0].get('enabled', 'all')
    assert done[1] == {'filename': str(tmp_path / 'snapshot.pickle')}
    assert not done[2]['enabled']


@relies_on("makes a gradient scaler's state, _scale and then _growth_tracker, when it first scales")
def test_forget_half_made_state():
    loss = torch.ones(())
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0)
    scaler._scale = torch.full((), 4.0)  # as where memory ends before the other one
    grad_scaler.forget_half_made_state(scaler)
    assert scaler.scale(loss) == 4
    scaler._scale.fill_(2.0)
    grad_scaler.forget_half_made_state(scaler)
    assert scaler.scale(loss) == 2
    assert scaler._growth_tracker == 0


@relies_on("unscales the gradients of an optimizer's groups in a scaler's _unscale_grads_")
def test_grad_scaler():
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]  # the last has no gradient
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = grad_scaler.GradScaler('cpu', init_scale=4.0)
    for factor in (1.0, torch.inf):
        optimizer.zero_grad()
        scaler.scale(weights[0].sum() + factor * weights[1].sum()).backward()
        scaler.unscale_(optimizer)
        assert weights[0].grad.tolist() == [1.0, 1.0]
        assert weights[1].grad.tolist() == [factor, factor]
        scaler.step(optimizer)
        scaler.update()
        assert weights[0].tolist() == weights[1].tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 2
