"""Compiled blocks: the same step, one compilation for all blocks that are alike."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memengine._torch_private.ops import compiled_checkpoints_write_twice
from memengine.memory import saved_bytes
from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    checkpoint_activations,
)
from memengine.techniques.activation_offload import offload_activations
from memengine.techniques.compiling import compile_blocks
from memengine.techniques.modules.forward_state import RandomState
from memengine.testing import assert_same_step
from tests.techniques.activation_checkpointing.test_checkpoint_activations import (
    make,
    step_of,
    train,
    trained,
    vit,
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize('name', ['vit', 'resnet'])
def test_same_steps(name):
    model = make(name)
    handle = compile_blocks(model, backend='eager')
    assert len(handle.names) == {'vit': 3, 'resnet': 5}[name]
    assert_same_step(train(model), trained(name))


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        (dict(), dict(fallback_random=True)),
        (dict(mode='max-autotune-no-cudagraphs'), dict(fallback_random=True, max_autotune=True)),
        (dict(options=dict(epilogue_fusion=False)), dict(fallback_random=True)),
        (dict(options=dict(fallback_random=False)), dict(fallback_random=False)),
    ],
)
def test_dropout_is_to_draw_as_it_does_without(monkeypatch, given, expected):
    said = {}
    monkeypatch.setattr(nn.Module, 'compile', lambda self, **options: said.update(options))
    handle = compile_blocks(nn.Sequential(nn.Linear(2, 2)), ['0'], **given)
    assert said['mode'] is None and expected.items() <= said['options'].items()
    assert handle.draws_others != expected['fallback_random']


@pytest.mark.parametrize('checkpointed', [False, True])
def test_blocks_share_one_compilation(checkpointed):
    counter = CompileCounterWithBackend('aot_eager')
    model, images = vit(depth=3).double(), torch.randn(2, 3, 32, 32).double()
    plain = copy.deepcopy(model)
    if checkpointed:
        checkpoint_activations(model)
    compile_blocks(model, backend=counter)
    for each in (model, plain):
        step_of(each, images)()
    assert counter.frame_count == 1
    assert_same_step(gradients(model), gradients(plain))


@pytest.mark.parametrize('options', [dict(), dict(keep=['matmuls', 'attention'])])
def test_with_checkpointing_and_offload(options):
    model, images = vit(depth=2).double(), torch.randn(4, 3, 32, 32).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, **options)
    compile_blocks(model, backend='aot_eager')
    step_of(model, images)()
    nbytes = [saved_bytes(lambda m=m: m(images), m, images) for m in (model, plain)]
    assert nbytes[0] < (0.75 if options else 0.2) * nbytes[1]
    handle = offload_activations(model, 'host', min_bytes=64)
    for each in (model, plain):
        each.zero_grad()
        step_of(each, images)()
    assert handle.moved_bytes[0] > 0
    assert_same_step(gradients(model), gradients(plain))


@pytest.mark.parametrize('options', [dict(), dict(keep='matmuls')])
def test_statistics_count_once_with_checkpointing(options):
    model = make('resnet')
    checkpoint_activations(model, **options)
    if compiled_checkpoints_write_twice():
        with pytest.raises(ValueError, match='would write into its buffers .* twice'):
            compile_blocks(model, backend='aot_eager')
        model.compile(backend='aot_eager')
    else:
        compile_blocks(model, backend='aot_eager')
    offload_activations(model, 'host', min_bytes=64)
    assert_same_step(train(model), trained('resnet'))


@pytest.mark.gpu
def test_checkpointed_parts_draw_what_the_plain_model_draws():
    """On a GPU torch gives them generators of their own, which no seed reaches."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.ReLU()).cuda()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, '0')
    model.compile(backend='aot_eager')
    for seed in (1, 2):  # the second, once its code has run
        outputs = []
        for each in (model, plain):
            torch.manual_seed(seed)
            outputs.append(each(torch.ones(4, 8, device='cuda')))
            outputs[-1].sum().backward()
        assert torch.equal(*outputs)
    assert_same_step(gradients(model), gradients(plain), 1e-6)


@pytest.mark.gpu
def test_what_torch_checkpoints_itself_is_replayed():
    x = torch.ones(64, device='cuda', requires_grad=True)
    state = RandomState([x.device])

    @torch.compile(backend='aot_eager')
    def masked(x):
        return checkpoint(lambda x: F.dropout(x).sin(), x, use_reentrant=False)

    first = masked(x)
    with state.replay():
        assert torch.equal(masked(x), first)
    assert not torch.equal(masked(x), first)


def test_what_does_not_go_together_is_refused():
    model = vit(depth=2)
    handle = checkpoint_activations(model, budget=0.5)
    with pytest.raises(ValueError, match=r'budget and compile_blocks .* \(blocks\.0\)'):
        compile_blocks(model)
    handle.undo()
    checkpoint_activations(model)
    with pytest.raises(
        ValueError, match=r'activation_checkpointing and compile_blocks.backend=eager'
    ):
        compile_blocks(model, backend='eager')


def test_a_backend_that_torch_does_not_know_is_refused_by_its_setting():
    model = vit(depth=2)
    with pytest.raises(ValueError, match=r"compile_blocks\.backend: .* did you mean 'inductor'\?"):
        compile_blocks(model, backend='inductr')
    assert all(compile_blocks(model, backend='aot_eager').names), 'nothing was compiled before'


def test_names_state_copies_pickles_and_undo():
    model, images = vit(depth=2), torch.randn(1, 3, 32, 32)
    counter = CompileCounterWithBackend('eager')
    keys = list(model.state_dict())
    handle = compile_blocks(model, backend=counter)
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match=r'blocks\.0 is compiled already'):
        compile_blocks(model)
    pickle.loads(pickle.dumps(model))(images)
    copy.deepcopy(model)(images)
    handle.undo()
    model(images)
    assert counter.frame_count == 0
    compile_blocks(model, backend=counter)
    model(images)
    assert counter.frame_count == 1


def test_nothing_to_compile_is_an_error():
    with pytest.raises(ValueError, match='compile_blocks: Linear has no repeated blocks'):
        compile_blocks(nn.Linear(2, 2))


@pytest.mark.slow
def test_the_real_compiler():
    model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2, num_classes=4)
    images = torch.randn(2, 3, 32, 32)
    plain = copy.deepcopy(model)
    compile_blocks(model)
    for each in (model, plain):
        step_of(each, images)()
    assert_same_step(gradients(model), gradients(plain), 1e-4)
