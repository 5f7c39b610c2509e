"""Activation offload: the same step, fewer bytes on the device, every byte out and back once."""

import copy
import gc
import pickle
import resource
import shutil
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from memengine.memory import SavedBytes
from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    checkpoint_activations,
)
from memengine.techniques.activation_offload import is_offloading, offload_activations
from memengine.techniques.compression.recomputed_activations import recompute_activations
from memengine.testing import assert_same_step, saved_bytes
from tests.techniques.activation_checkpointing.test_checkpoint_activations import (
    make,
    step_of,
    train,
    vit,
)

SMALL = dict(min_bytes=64)
WAYS = {
    'host': dict(store='host', **SMALL),
    'disk': dict(store='disk', **SMALL),
    'no look-ahead': dict(store='host', look_ahead=0, **SMALL),
    'far look-ahead': dict(store='disk', look_ahead=50, **SMALL),
}
DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize('name', ['vit', 'resnet', 'odd'])
@pytest.mark.parametrize('way', WAYS)
def test_same_steps(name, way):
    model = make(name)
    handle = offload_activations(model, **WAYS[way])
    assert_same_step(train(model), train(make(name)))
    assert handle.moved_bytes[0] > 0 and handle.stored_bytes == 0


@pytest.mark.edge(
    'activation_offload',
    'exact',
    'Parts of one memory that are written to one by one (gates of an LSTM)',
)
@pytest.mark.parametrize('kind', [nn.LSTM, nn.GRU, nn.RNN])
def test_gates_that_are_computed_in_place_in_one_memory(kind):
    torch.manual_seed(0)
    plain = kind(6, 5, num_layers=2, bidirectional=True).double()
    model, x = copy.deepcopy(plain), torch.randn(7, 4, 6, dtype=torch.float64)
    offload_activations(model, 'host', min_bytes=0)
    for one in (model, plain):
        one(x)[0].square().sum().backward()
    assert_same_step(gradients(model), gradients(plain))


@pytest.mark.parametrize('device', DEVICES)
def test_bytes_that_stay_are_those_of_small_tensors_and_a_look_ahead(device):
    model = vit(depth=6).to(device)
    images = torch.randn(4, 3, 32, 32, device=device)
    plain = saved_bytes(step_of(model, images), model, images)
    handle = offload_activations(model, 'host', min_bytes=2048)
    with SavedBytes(model, images) as saved:
        step_of(model, images)()
    assert saved.peak_bytes < 0.05 * plain
    assert plain - saved.peak_bytes == pytest.approx(handle.peak_stored_bytes, rel=0.02)


def test_every_byte_goes_out_and_comes_back_once():
    model, images = vit(depth=6), torch.randn(4, 3, 32, 32)
    handle = offload_activations(model, 'host', **SMALL)
    step_of(model, images)()
    out, back = handle.moved_bytes
    assert out == back == handle.peak_stored_bytes


def test_minimum_size():
    model, images = vit(depth=2), torch.randn(4, 3, 32, 32)
    handle = offload_activations(model, 'host', min_bytes=10**9)
    step_of(model, images)()
    assert handle.moved_bytes == (0, 0)


def test_a_model_whose_forward_is_not_called_is_named_as_such():
    """A LightningModule's ``training_step`` may call its parts."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    handle = offload_activations(model, 'host', min_bytes=0)
    model[1](model[0](torch.ones(32, 64))).sum().backward()
    assert 'the forward of Sequential was not called' in handle.report().left


class Shared(nn.Module):
    """One storage, saved by several ops and as views."""

    def forward(self, x):
        y = 2 * x
        return (y.sin() * y.cos() * y.t().exp().t() * y[:2].repeat(2, 1).tanh()).sum()


def test_a_storage_that_is_saved_several_times_moves_once():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Shared())
    x = torch.randn(4, 64, requires_grad=True)
    handle = offload_activations(model, 'host', min_bytes=0, look_ahead=0)
    plain = copy.deepcopy(model)
    plain.forward.undo()
    kept = saved_bytes(lambda: plain(x), plain, x)
    loss = model(x)
    assert handle.stored_bytes == kept
    loss.backward()
    loss = plain(x)
    loss.backward()
    assert_same_step(gradients(model), gradients(plain))


def test_look_ahead_is_bounded():
    sizes = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            out, back = handle.moved_bytes
            sizes.append(back)
            return gradient

    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(6):
                x = Watch.apply(x.sin())
            return x.sum()

    x = torch.randn(256, requires_grad=True)
    for look_ahead in (0, 1, 3):
        model, sizes = nn.Sequential(nn.Linear(256, 256), Chain()), []
        handle = offload_activations(model, 'host', min_bytes=512, look_ahead=look_ahead)
        model(x).backward()
        # When the k-th sine's gradient is wanted, k sines and what is ahead of them are back.
        nbytes = 256 * 4
        assert sizes == [nbytes * min(max(k + look_ahead, 0) if k else 0, 6) for k in range(6)]


def test_parameters_buffers_and_inputs_stay():
    model = nn.Sequential(nn.Linear(64, 64))
    handle = offload_activations(model, 'host', min_bytes=0)
    model(torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert handle.moved_bytes == (0, 0)


def test_with_checkpointing_the_inputs_of_blocks_move():
    model = vit(depth=6).double()
    images = torch.randn(4, 3, 32, 32).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model)
    checkpointed = copy.deepcopy(model)
    handle = offload_activations(model, 'disk', min_bytes=2048)
    with SavedBytes(model, images) as saved:
        loss = model(images).square().sum()
        live = saved.live_bytes
    with SavedBytes(checkpointed, images) as saved:
        other = checkpointed(images).square().sum()
        assert live < 0.1 * saved.live_bytes
    assert handle.stored_bytes == pytest.approx(saved.live_bytes, rel=0.1)
    loss.backward(), other.backward()
    step_of(plain, images)()
    assert_same_step(gradients(model), gradients(plain))


@pytest.mark.parametrize('options', [dict(keep='matmuls'), dict(budget=0.5)])
def test_with_selective_checkpointing(options):
    model, images = vit().double(), torch.randn(4, 3, 32, 32).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, **options)
    offload_activations(model, 'host', **SMALL)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            step_of(each, images)()
        assert_same_step(gradients(model), gradients(plain))


def mapped_bytes(folder):
    """Of files in a folder that this process has mapped, in whole pages."""
    lines = Path('/proc/self/maps').read_text().splitlines()
    ranges = [line.split()[0] for line in lines if f'{folder}/' in line]
    ends = [[int(end, 16) for end in each.split('-')] for each in ranges]
    return sum(stop - start for start, stop in ends)


def test_files_go_with_the_graph_and_have_no_names_that_a_killed_process_could_leave(tmp_path):
    model, images = vit(depth=1), torch.randn(2, 3, 32, 32)
    handle = offload_activations(model, 'disk', folder=tmp_path, **SMALL)
    loss = model(images).sum()
    assert mapped_bytes(tmp_path) >= handle.stored_bytes > 0
    assert not list(tmp_path.iterdir())
    loss.backward()
    assert not mapped_bytes(tmp_path)


def test_a_tensor_of_no_bytes_moves_to_a_file(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    offload_activations(model, 'disk', folder=tmp_path, min_bytes=0)
    x = torch.ones(0, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == (0, 4)


@pytest.mark.parametrize('cause', ['full', 'missing'])
def test_a_file_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path, cause):
    model = nn.Sequential(nn.GELU(), nn.Linear(64, 64))
    folder = tmp_path if cause == 'full' else tmp_path / 'missing'
    offload_activations(model, 'disk', folder=folder, min_bytes=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if cause == 'full':
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match=rf'to {folder} \(.*set activation_offload.folder'):
            model(torch.ones(64, 64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    shutil.rmtree(tmp_path)
    nn.Linear(64, 64)(torch.ones(64, 64))  # whose input no hooks that had stayed could write


@pytest.mark.edge(
    'activation_offload',
    'exact',
    'A second backward, a gradient of a gradient, a graph that is thrown away',
)
def test_backward_twice_double_backward_and_a_graph_that_is_thrown_away():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    x = torch.randn(8, 32, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(model)
    handle = offload_activations(model, 'host', min_bytes=0)
    model(x)
    assert handle.stored_bytes == 0
    for each in (model, plain):
        loss = each(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward(retain_graph=True)
        loss.backward()
    assert_same_step(gradients(model), gradients(plain))


class Overwriting(nn.Module):
    def forward(self, x):
        z = x.sin().exp()
        z.view(-1)[1:].mul_(2)
        return z.sum()


@pytest.mark.edge(
    'activation_offload',
    'refused',
    'A saved tensor that is written to, as in the plain step, whether it has moved or not',
)
@pytest.mark.parametrize('min_bytes', [0, 2**20])  # it moves, or stays
def test_a_saved_tensor_that_is_overwritten_is_an_error_as_without(min_bytes):
    model = Overwriting()
    offload = offload_activations(model, 'host', min_bytes=min_bytes)
    loss = model(torch.ones(3, 2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r'modified by an inplace operation.* shape \(3, 2\)'):
        loss.backward()
    assert bool(offload.moved_bytes[0]) == (not min_bytes)


@pytest.mark.edge(
    'activation_offload', 'exact', 'A step’s inputs: nothing holds them once it is over'
)
def test_inputs_are_let_go_without_a_collection_of_garbage():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    offload_activations(model, 'host', min_bytes=0)
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(2, 4)
        memory = weakref.ref(x.untyped_storage())
        model(x).sum().backward()
        del x
        assert memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize('store', ['host', 'disk'])
def test_steps_leave_nothing_to_a_collection_of_garbage(store):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    offload_activations(model, store, min_bytes=0)
    model(torch.randn(2, 4)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        model(torch.randn(2, 4)).sum().backward()
        assert not gc.collect()
    finally:
        gc.enable()


def test_autocast():
    model, x = vit(), torch.randn(4, 3, 32, 32)
    plain = copy.deepcopy(model)
    offload_activations(model, 'disk', **SMALL)
    for each in (model, plain):
        with torch.autocast('cpu', torch.bfloat16):
            loss = F.cross_entropy(each(x), torch.tensor([0, 1, 2, 3]))
        loss.backward()
    assert_same_step(gradients(model), gradients(plain))


def test_copies_pickles_and_undo():
    model, images = vit(depth=1), torch.randn(2, 3, 32, 32)
    handle = offload_activations(model, 'host', **SMALL)
    with pytest.raises(ValueError, match='VisionTransformer is offloaded already'):
        offload_activations(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step_of(other, images)()
        assert other.forward.moved_bytes[0] > 0 == handle.moved_bytes[0]
    handle.undo()
    assert 'forward' not in vars(model)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(store='gpu'), "store is 'auto', 'host' or 'disk', got 'gpu'"),
        (dict(min_bytes=-1), 'min_bytes is a whole number, at least 0'),
        (dict(look_ahead=1.5), 'look_ahead is a whole number, at least 0'),
        (dict(store='host', folder='x'), "is for store='disk'"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        offload_activations(vit(depth=1), **options)


def test_under_compile():
    model, images = vit(depth=1).double(), torch.randn(2, 3, 32, 32).double()
    plain = copy.deepcopy(model)
    handle = offload_activations(model, 'host', **SMALL)
    torch.compile(model, backend='aot_eager')(images).square().sum().backward()
    step_of(plain, images)()
    assert_same_step(gradients(model), gradients(plain))
    assert handle.moved_bytes[0] > 0


@pytest.mark.edge(
    'activation_offload',
    'exact',
    '`torch.func.jvp`, `vjp` and `grad`, and tangents of `torch.autograd.forward_ad`: nothing '
    'moves',
)
@pytest.mark.parametrize('transform', ['jvp', 'vjp', 'grad', 'dual level'])
def test_transforms_of_torch_func_run_as_without(transform):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).double()
    x, tangent = torch.randn(2, 3, 6, dtype=torch.float64)

    def result():
        if transform == 'jvp':
            return torch.func.jvp(model, (x,), (tangent,))
        if transform == 'vjp':
            out, pull = torch.func.vjp(model, x)
            return out, *pull(tangent)
        if transform == 'dual level':
            with forward_ad.dual_level():
                out, pushed = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
                return out, pushed, *torch.autograd.grad(out.sum(), list(model.parameters()))
        return torch.func.grad(lambda x: model(x).square().sum())(x)

    plain = result()
    offload_activations(model, min_bytes=0)
    torch.testing.assert_close(result(), plain, rtol=0, atol=0)


@pytest.mark.edge(
    'activation_offload',
    'exact',
    'RReLU, which saves its noise before it fills it: what is fresh moves after its operation',
)
@pytest.mark.parametrize('inplace', [False, True])
@pytest.mark.parametrize('last', [False, True])
def test_noise_that_is_filled_after_it_is_saved(inplace, last, fresh_memory_is_nan):
    torch.manual_seed(0)
    after = [] if last else [nn.Linear(6, 6)]
    model = nn.Sequential(nn.Linear(6, 6), nn.RReLU(inplace=inplace), *after).double()
    x = torch.randn(3, 6, dtype=torch.float64)

    def gradient():
        torch.manual_seed(1)
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    expected = gradient()
    handle = offload_activations(model, 'host', min_bytes=0)
    torch.testing.assert_close(gradient(), expected, rtol=0, atol=0)
    assert handle.moved_bytes[0] >= 2 * x.nbytes


@pytest.mark.edge('activation_offload', 'exact', 'A forward that raises: the offload ends with it')
def test_offload_ends_with_a_forward_that_raises():
    model = nn.Linear(6, 6)
    offload_activations(model, min_bytes=0)
    with pytest.raises(RuntimeError, match='shapes cannot be multiplied'):
        model(torch.ones(2, 5))
    assert not is_offloading()
    message = 'no hooks here'
    with torch.autograd.graph.disable_saved_tensors_hooks(message):
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(2, 6))
    assert not is_offloading()


def host_running_ahead():
    """As far as it can, which the simulated GPU has to be told; with a GPU it does so by itself."""
    simulated = sys.modules.get('tests.simulated_gpu.device')
    return nullcontext() if simulated is None else simulated.host_running_ahead()


def reserved_by_a_step(model, images):
    """Most bytes that the allocator takes from the device for one step, the model beside."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with host_running_ahead():
        model(images).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


@pytest.mark.gpu
@pytest.mark.parametrize('look_ahead', [0, 2])
def test_the_device_holds_less_though_the_host_runs_ahead(look_ahead):
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', num_classes=4, img_size=64, depth=8).cuda()
    images = torch.randn(64, 3, 64, 64, device='cuda')
    plain = reserved_by_a_step(model, images)
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    offload_activations(model, 'host', min_bytes=2**14, look_ahead=look_ahead)
    assert reserved_by_a_step(model, images) < 0.5 * plain
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.gpu
def test_what_is_compared_in_a_forward_does_not_come_back_to_stay():
    def held_after_first_forward(look_ahead):
        model, images = vit().cuda(), torch.randn(16, 3, 32, 32, device='cuda')
        gc.collect()
        before = torch.cuda.memory_allocated()
        recompute_activations(model)
        offload_activations(model, 'host', min_bytes=2**10, look_ahead=look_ahead)
        loss = model(images).sum()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held

    assert held_after_first_forward(look_ahead=2) == held_after_first_forward(look_ahead=0)


@pytest.mark.gpu
def test_memory_of_what_nobody_waited_for_is_not_given_away_before_it_has_arrived():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    handle = offload_activations(model, 'host', min_bytes=0)
    x = torch.randn(4096, 256, device='cuda')
    loss = model(x).sum()
    torch.autograd.grad(loss, model[-1].weight)  # what the layers before saved is on its way
    out, back = handle.moved_bytes
    assert out == back == 3 * x.nbytes
    del loss
    others = [torch.full_like(x, 7) for _ in range(8)]
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.gpu
def test_under_a_default_device():
    class Square(torch.autograd.Function):  # saves outside of torch's functions
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    class Model(nn.Module):
        def forward(self, x):
            return Square.apply(x + 1)

    with torch.device('cuda'):
        model, x = Model(), torch.ones(2, 64, requires_grad=True)
        handle = offload_activations(model, 'host', min_bytes=0)
        model(x).sum().backward()
    assert handle.moved_bytes == (x.nbytes, x.nbytes)
