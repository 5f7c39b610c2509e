"""Clipping, parameter groups and schedules."""

import math

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from torch import nn

from memengine.engine.optim import (
    AmpOptimWrapper,
    CosineWeightDecay,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
)
from memengine.registry import OPTIMIZERS
from memengine.techniques.sharding.clipping import clip_each_grad_norm_


def test_each_norm_clips_every_parameter_on_its_own():
    small, large = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    small.grad, large.grad = torch.full((4,), 0.1), torch.full((4,), 10.0)
    norm = clip_each_grad_norm_([small, large], max_norm=3.0)
    assert norm.item() == pytest.approx(math.hypot(0.2, 20.0))
    assert torch.equal(small.grad, torch.full((4,), 0.1))
    assert large.grad.norm().item() == pytest.approx(3.0, rel=1e-6)


def test_wrapper_clips_as_its_setting_says():
    weight = nn.Parameter(torch.zeros(4))
    wrapper = OptimWrapper(
        torch.optim.SGD([weight], lr=1.0), clip_grad=dict(type='each_norm', max_norm=3.0)
    )
    wrapper.update_params(weight.sum() * 100)
    assert weight.norm().item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        (dict(accumulative_counts=0), 'accumulative_counts'),
        (dict(precision='int8'), 'precision'),
        (dict(precision='fp16', loss_scale='fast'), 'loss_scale'),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        OptimWrapper(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **settings)


@pytest.mark.usefixtures('beside_a_gpu')
def test_precision_is_that_of_the_parameters_device():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for wrapper in (OptimWrapper(optimizer, precision='bf16'), AmpOptimWrapper(optimizer)):
        with wrapper.optim_context(layer):
            assert layer(torch.ones(1, 4)).dtype == torch.bfloat16


def network():
    frozen = nn.Linear(3, 3)
    frozen.requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2), frozen)


def build(paramwise):
    config = ConfigDict(
        type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.1, weight_decay=0.04)
    )
    return DefaultOptimWrapperConstructor(config, paramwise)(network())


def test_groups_are_merged_by_setting_and_leave_frozen_parameters_out():
    wrapper = build(
        dict(bias_decay_mult=0.0, norm_decay_mult=0.0, custom_keys={'2.weight': dict(lr_mult=0.5)})
    )
    groups = {
        (group['lr'], group['weight_decay']): [tuple(p.shape) for p in group['params']]
        for group in wrapper.optimizer.param_groups
    }
    assert groups == {
        (0.1, 0.04): [(3, 4)],
        (0.1, 0.0): [(3,), (3,), (3,), (2,)],
        (0.05, 0.04): [(2, 3)],
    }


@pytest.mark.parametrize(
    ('keys', 'others'),
    [
        ({'': dict(lr_mult=0.5)}, 4),  # a norm's two, and two biases
        ({'2.': dict(lr_mult=0.5)}, 1),
        ({'': dict(lr_mult=0.5, decay_mult=1.0)}, 0),
        ({'1.': dict(decay_mult=0.5)}, 0),
        ({'2.weight': dict(lr_mult=0.5)}, 0),
    ],
)
def test_weight_decay_of_norms_and_biases_that_keys_name_is_said(monkeypatch, keys, others):
    said = []
    monkeypatch.setattr(MMLogger.get_current_instance(), 'warning', said.append)
    build(dict(bias_decay_mult=0.0, norm_decay_mult=0.0, custom_keys=keys))
    assert len(said) == bool(others)
    assert not others or f' {others} tensors that custom_keys name ' in said[0]


@pytest.mark.parametrize(
    ('paramwise', 'said'),
    [
        (dict(bias_decay_mult=0.0), 'bias_decay_mult'),
        (dict(custom_keys={'2.weight': dict(decay_mult=0.0)}), 'custom_keys.2.weight.decay_mult'),
    ],
)
def test_a_multiple_of_a_weight_decay_that_is_not_set_is_refused(paramwise, said):
    config = ConfigDict(optimizer=dict(type='SGD', lr=0.1))
    with pytest.raises(ValueError, match=rf'optimizer.weight_decay is not set, .*\({said}\)'):
        DefaultOptimWrapperConstructor(config, paramwise)


def test_a_key_that_no_parameter_has_is_refused():
    with pytest.raises(ValueError, match=r'custom_keys\.wieght: no parameter .* mean .weight.'):
        build(dict(custom_keys={'2.weight': dict(lr_mult=0.5), 'wieght': dict(decay_mult=0.0)}))


def test_weight_decay_follows_half_a_cosine_and_spares_groups_without():
    wrapper = build(dict(bias_decay_mult=0.0, norm_decay_mult=0.0))
    schedule = CosineWeightDecay(wrapper, end_value=0.4, end=10)
    for step in range(12):
        decays = [group['weight_decay'] for group in wrapper.optimizer.param_groups]
        done = min(step, 9) / 10  # MMEngine's schedules stop one step before their end
        expected = 0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi * done)) / 2
        assert decays == pytest.approx([expected, 0.0])
        wrapper.optimizer.step()
        schedule.step()


def test_a_schedule_of_a_weight_decay_that_is_not_there_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r'end_value=0\.4 in proportion to .*, which is 0'):
        CosineWeightDecay(OptimWrapper(optimizer), end_value=0.4, end=10)
    CosineWeightDecay(optimizer, end_value=0.0, end=10)


def test_weight_decay_by_epoch_converts_to_iterations():
    wrapper = build(None)
    schedule = CosineWeightDecay.build_iter_from_epoch(
        wrapper, end_value=0.4, begin=1, end=3, epoch_length=5
    )
    assert (schedule.begin, schedule.end, schedule.by_epoch) == (5, 15, False)


def test_lars_trusts_by_the_ratio_of_norms():
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = OPTIMIZERS.get('LARS')(
        [weight], lr=1.0, trust_coeff=0.001, momentum=0.0, always_adapt=True
    )
    weight.grad = torch.tensor([[0.0, 2.0]])
    optimizer.step()
    assert torch.allclose(weight, torch.tensor([[3.0, 4.0 - 2.0 * 0.001 * 5 / 2]]), atol=1e-6)
