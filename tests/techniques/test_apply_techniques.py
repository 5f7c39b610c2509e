"""Techniques by key in anybody's loop: the same step, fewer bytes, one order, no half-done work."""

import copy

import pytest
import timm
import torch
from torch import nn

import memengine
from memengine import SavedBytes, apply_techniques
from memengine.technique import in_order, techniques
from memengine.testing import assert_same_step


def model_and_images():
    torch.manual_seed(0)
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=16, patch_size=4, depth=2, num_classes=5
    )
    return model.double(), torch.randn(4, 3, 16, 16, dtype=torch.float64)


def gradients(model, images):
    model.zero_grad()
    with SavedBytes(model, images) as saved:
        model(images).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, saved.peak_bytes


EXACT = [
    dict(recomputed_activations=True),
    dict(activation_checkpointing='blocks'),
    dict(activation_checkpointing=['blocks'], recomputed_activations=dict(exclude=['norm'])),
]


@pytest.mark.parametrize('settings', EXACT, ids=str)
def test_same_step_fewer_bytes_and_back(settings):
    model, images = model_and_images()
    plain = copy.deepcopy(model)
    expected, most = gradients(plain, images)
    with apply_techniques(model, **settings) as applied:
        assert set(applied.handles) == set(settings)
        applied.before_step(0)
        found, less = gradients(model, images)
        assert_same_step(found, expected)
        assert less < 0.8 * most
        assert len(applied.report()) >= 1
    assert applied.handles == {}
    assert gradients(model, images)[1] == most


@pytest.mark.parametrize(
    'settings', [*EXACT, dict(dropit=0.9), dict(quantized_activations=8)], ids=str
)
@pytest.mark.parametrize('is_trained', [False, True])
def test_a_model_is_exported_with_techniques_at_work(settings, is_trained):
    model, images = model_and_images()
    expected = model.train(is_trained)(images)
    with apply_techniques(model, **settings), torch.set_grad_enabled(is_trained):
        exported = torch.export.export(model, (images,), strict=False)
    torch.testing.assert_close(exported.module()(images), expected)


def test_they_are_applied_in_the_one_order():
    model, _ = model_and_images()
    given = dict(activation_offload=True, dropit=0.9, recomputed_activations=True)
    applied = apply_techniques(model, **given)
    order = [technique.key for technique in in_order(techniques().values())]
    assert list(applied.handles) == sorted(applied.handles, key=order.index)
    applied.undo()


@pytest.mark.parametrize(
    ('settings', 'said'),
    [
        (dict(dropitt=0.9), "did you mean 'dropit'"),
        (dict(nothing_like_it=1), 'there are sync_bn'),
        (dict(dropit=1.5), 'dropit'),
        (dict(compile_blocks=True, dropit=0.9), 'compile_blocks and dropit do not go together'),
        (
            dict(compile_blocks=dict(backend='eager'), activation_checkpointing='blocks'),
            'do not go together',
        ),
        (
            dict(compile_blocks=True, activation_checkpointing=dict(budget=0.5)),
            'do not go together',
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_changes(settings, said):
    model, _ = model_and_images()
    with pytest.raises(ValueError, match=said):
        apply_techniques(model, **settings)
    assert not any('forward' in vars(module) for module in model.modules())


def test_one_that_fails_leaves_none_behind():
    model, _ = model_and_images()
    with pytest.raises(ValueError, match='blocs'):
        apply_techniques(model, recomputed_activations=True, activation_checkpointing='blocs')
    assert not any('forward' in vars(module) for module in model.modules())


WRAPPED = [
    (dict(activation_offload=True), ''),
    (dict(activation_checkpointing='blocks'), 'blocks.1'),
]


@pytest.mark.parametrize(('other', 'name'), WRAPPED, ids=str)
def test_an_undo_that_was_refused_can_be_repeated(other, name):
    """A trainer has wrapped a module's forward, and unwraps it only after the first try."""
    model, _ = model_and_images()
    applied = apply_techniques(model, recomputed_activations=True, **other)
    module = model.get_submodule(name)
    ours = module.forward
    module.forward = lambda *args: ours(*args)
    with pytest.raises(ValueError, match='undo that first'):
        applied.undo()
    module.forward = ours
    applied.undo()
    assert applied.handles == {}
    assert not any('forward' in vars(module) for module in model.modules())


def test_nothing_done_is_an_error_unless_said():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    applied = apply_techniques(model, recomputed_activations=True)
    model(x).sum().backward()
    with pytest.raises(ValueError, match='strict=False'):
        applied.report()
    applied.undo()
    applied = apply_techniques(model, recomputed_activations=dict(strict=False))
    model(x).sum().backward()
    assert len(applied.report()) == 1


def test_a_schedule_of_bits_asks_for_the_loss():
    model, images = model_and_images()
    settings = dict(average_bits=4, min_numel=0)
    applied = apply_techniques(model.float(), quantized_activations=settings)
    images = images.float()
    with pytest.raises(ValueError, match='loss='):
        applied.before_step(0)
    said = []
    applied.before_step(0, lambda: model(images).square().mean(), said.append)
    assert said
    applied.undo()


def test_it_is_public():
    assert memengine.apply_techniques is apply_techniques
