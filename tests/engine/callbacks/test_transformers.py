"""transformers' Trainer with techniques: the plain trainer's weights in fewer bytes."""

import os
import tempfile
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memengine import SavedBytes
from memengine.testing import run_ranks

transformers = pytest.importorskip('transformers', reason='transformers is not installed')

from memengine.engine.callbacks.transformers import TechniquesCallback  # noqa: E402

needs_accelerate = pytest.mark.skipif(
    find_spec('accelerate') is None, reason="accelerate, which the Trainer needs, isn't installed"
)


def made(model):
    """A callback as the Trainer has it, applied to a model."""
    callback = TechniquesCallback(dropit=0.5)
    callback.on_init_end(None, None, None, model=model)
    return callback


def test_it_applies_follows_schedules_and_says_once_what_was_done(monkeypatch, capsys):
    state, steps = SimpleNamespace(global_step=0, is_world_process_zero=True), []
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    callback = made(model)
    monkeypatch.setattr(callback.applied.handles['dropit'], 'before_step', steps.append)
    for state.global_step in range(2):
        callback.on_step_begin(None, state, None)
        model(torch.ones(32, 64)).sum().backward()
        callback.on_step_end(None, state, None)
    assert [step.iteration for step in steps] == [0, 1]
    assert capsys.readouterr().out == f'{callback.said[0]}\n'


def test_it_raises_when_nothing_was_done():
    model = nn.Sequential(nn.ReLU())
    callback = made(model)
    model(torch.ones(2, 2, requires_grad=True)).sum().backward()
    with pytest.raises(ValueError, match='dropit: the first iteration saved nothing'):
        callback.on_step_end(None, SimpleNamespace(is_world_process_zero=True), None)


def classifier():
    torch.manual_seed(0)
    sizes = dict(image_size=8, patch_size=2, num_channels=1, hidden_size=32, intermediate_size=128)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=10)
    )


def trainer(model, folder, model_init=None, **techniques):
    off = dict(report_to='none', save_strategy='no', logging_strategy='no', disable_tqdm=True)
    arguments = transformers.TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=32, use_cpu=True, optim='sgd', **off
    )
    images = torch.randn(128, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    samples = [dict(pixel_values=image, labels=at % 10) for at, image in enumerate(images)]
    callbacks = [TechniquesCallback(**techniques)]
    return transformers.Trainer(
        model, arguments, train_dataset=samples, model_init=model_init, callbacks=callbacks
    )


def train(folder, is_sharded, **techniques):
    """Two steps on this rank: the whole weights, and the most bytes saved.

    The model is sharded by transformers as it is loaded: accelerate shards none on CPUs.
    """
    if is_sharded:
        shards = transformers.distributed.DistributedConfig(
            fsdp_size=2, fsdp_plan={'vit.layers.*': 'free_full_weight'}
        )
        model = transformers.ViTForImageClassification.from_pretrained(
            folder, distributed_config=shards
        )
    else:
        model = transformers.ViTForImageClassification.from_pretrained(folder)
    with SavedBytes(model) as saved, tempfile.TemporaryDirectory() as place:
        training = trainer(model, place, **techniques)
        training.train()
    wrapped = FSDPModule if is_sharded else DistributedDataParallel
    assert isinstance(training.model_wrapped, wrapped)
    whole = {
        name: weight.full_tensor() if is_sharded else weight
        for name, weight in model.state_dict().items()
    }
    return whole, saved.peak_bytes


def on_rank(rank, world_size, folder, is_sharded):
    """Which weights are the same with techniques, and their share of the plain training's bytes."""
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update({name: f'{number}' for name, number in place.items()})
    plain, most = train(folder, is_sharded)
    both = dict(recomputed_activations=True, activation_checkpointing='vit.layers.0')
    weights, least = train(folder, is_sharded, **both)
    start = transformers.ViTForImageClassification.from_pretrained(folder).state_dict()
    assert not torch.equal(start['classifier.weight'], plain['classifier.weight'])
    return {name: torch.equal(plain[name], weights[name]) for name in plain}, least / most


@needs_accelerate
@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
def test_two_ranks_learn_the_same_in_fewer_bytes(strategy, tmp_path):
    if strategy == 'fsdp2':
        sharding = 'transformers.distributed.fsdp'
        pytest.importorskip(sharding, reason='this transformers shards no model by itself')
    classifier().save_pretrained(tmp_path)
    for same, share in run_ranks(2, on_rank, tmp_path, strategy == 'fsdp2'):
        assert all(same.values()), same
        assert share < 0.7


@needs_accelerate
def test_each_training_says_what_was_done_and_is_refused_where_that_is_nothing(tmp_path, capsys):
    model = classifier()
    training = trainer(model, tmp_path, activation_checkpointing='vit.layers.1')
    for _ in range(2):
        training.train()
        assert capsys.readouterr().out.count('Activation checkpointing: 1 modules') == 1
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    with pytest.raises(ValueError, match='1 of 1 modules were not computed again'):
        training.train()


def test_a_model_that_is_made_anew_has_them():
    """Applied at the Trainer's start, and to what ``model_init`` gives when training begins."""
    callback = made(first := nn.Linear(64, 4))
    second = nn.Sequential(nn.Linear(64, 4))
    callback.on_train_begin(None, None, None, model=second)
    second(torch.ones(32, 64)).sum().backward()
    callback.on_step_end(None, SimpleNamespace(is_world_process_zero=True), None)
    assert 'forward' not in vars(first)
    assert any('dropit' in line for line in callback.said)


def test_one_that_is_added_later_is_applied_when_training_begins():
    callback = TechniquesCallback(dropit=0.5)
    callback.on_train_begin(None, None, None, model=nn.Linear(64, 4))
    assert list(callback.applied.handles) == ['dropit']


def test_one_of_two_trainers_is_at_the_model_that_trains():
    callback = made(first := nn.Linear(64, 4))
    callback.on_init_end(None, None, None, model=(second := nn.Linear(64, 4)))
    for trains, rests in ((first, second), (second, first)):
        callback.on_train_begin(None, None, None, model=trains)
        assert 'forward' in vars(trains) and 'forward' not in vars(rests)


def test_a_wrapper_around_the_model_is_no_other_model():
    callback = made(model := nn.Linear(64, 4))
    before = callback.applied
    callback.on_train_begin(None, None, None, model=nn.Sequential(model))
    assert callback.applied is before


@needs_accelerate
def test_trainers_with_a_function_for_the_model(tmp_path, capsys):
    blocks = dict(activation_checkpointing='vit.layers.1')
    training = trainer(None, tmp_path, model_init=classifier, **blocks)
    training.train()
    assert capsys.readouterr().out.count('Activation checkpointing: 1 modules') == 1


@needs_accelerate
def test_what_was_undone_is_not_applied_again(tmp_path):
    training = trainer(model := classifier(), tmp_path, recomputed_activations=True)
    training.train()
    callback = next(
        one for one in training.callback_handler.callbacks if isinstance(one, TechniquesCallback)
    )
    callback.applied.undo()
    training.train()
    assert not callback.applied.handles
    assert all('forward' not in vars(module) for module in model.modules())
