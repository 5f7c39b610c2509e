"""The step inside backward by config: the plain wrapper's run, or a refusal with the remedy."""

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub
from torch import nn

from memengine.engine.config.check import check_config
from memengine.engine.config.file import load_config
from memengine.engine.optim import OptimizerInBackwardOptimWrapper, OptimWrapper
from memengine.engine.step import Progress, run_step
from memengine.engine.wrappers import MMDistributedDataParallel
from memengine.models import CLIP, SimCLR
from memengine.testing import assert_same_step, run_ranks
from tests.engine.test_sliced import model_and_batch
from tests.engine.toy import Losses, params, toy_runner
from tests.test_configs import ROOT

BY_TYPE = [
    None,
    dict(type='each_norm', max_norm=0.05),
    dict(type='value', clip_value=0.01),
]


def train(kind, wrapper, steps=4, precision='fp32', **settings):
    model, _ = model_and_batch(kind)
    if precision != 'fp32':
        model = model.float()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    optim = wrapper(optimizer, precision=precision, **settings)
    hub = MessageHub.get_current_instance()
    logs = []
    for seed in range(steps):
        _, data = model_and_batch(kind, seed)
        if precision != 'fp32':
            data['inputs'] = [view.float() for view in data['inputs']]
        torch.manual_seed(seed)
        logs.append(run_step(model, data, optim))
        if settings.get('clip_grad', {}).get('type') == 'each_norm':
            logs[-1]['grad_norm'] = torch.tensor(hub.get_scalar('train/grad_norm').current())
    return logs, dict(model.named_parameters())


@pytest.mark.parametrize('clip_grad', BY_TYPE)
@pytest.mark.parametrize('kind', [SimCLR, CLIP])
def test_a_run_is_that_of_the_plain_wrapper(kind, clip_grad):
    settings = dict(clip_grad=clip_grad) if clip_grad else {}
    logs, expected = train(kind, OptimWrapper, **settings)
    actual_logs, actual = train(kind, OptimizerInBackwardOptimWrapper, **settings)
    for got, want in zip(actual_logs, logs, strict=True):
        assert_same_step(got, want, tolerance=1e-7 if 'grad_norm' in want else 1e-12)
    assert_same_step(actual, expected, tolerance=1e-12)


def test_bf16_is_that_of_the_plain_wrapper():
    _, expected = train(SimCLR, OptimWrapper, precision='bf16')
    _, actual = train(SimCLR, OptimizerInBackwardOptimWrapper, precision='bf16')
    assert_same_step(actual, expected, tolerance=0.0)


def test_dino_keeps_its_prototypes_frozen_and_moves_its_teacher_once():
    results = []
    for wrapper in (OptimWrapper, OptimizerInBackwardOptimWrapper):
        model, _ = model_and_batch('DINO')
        prototypes = {n: p.clone() for n, p in model.student.head.last_layer.named_parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        optim = wrapper(torch.optim.AdamW(trained, lr=1e-3))
        optim.optimizer.register_step_pre_hook(lambda *_, m=model: m.before_update())
        optim.optimizer.register_step_post_hook(lambda *_, m=model: m.after_update())
        for step in range(4):
            model.set_progress(Progress(step, 4, step // 2, 2))
            run_step(model, model_and_batch('DINO', step)[1], optim)
            now = dict(model.student.head.last_layer.named_parameters())
            moved = any(not torch.equal(now[name], prototypes[name]) for name in now)
            assert moved == (step >= 2)
        results.append({name: p.detach() for name, p in model.named_parameters()})
    assert_same_step(results[1], results[0], tolerance=1e-12)


def runner_of(folder, in_backward, losses=None, **kwargs):
    kind = 'OptimizerInBackwardOptimWrapper' if in_backward else 'OptimWrapper'
    optim_wrapper = dict(
        type=kind,
        optimizer=dict(type='SGD', lr=0.05, momentum=0.9, weight_decay=0.1),
        paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys={'net.0': dict(lr_mult=0.1)}),
    )
    return toy_runner(folder, losses, optim_wrapper=optim_wrapper, **kwargs)


def test_schedules_and_resuming_hold_and_it_can_be_switched_between_runs(tmp_path):
    whole = Losses()
    plain = runner_of(tmp_path / 'plain', False, whole)
    plain.train()
    for before, after in ((True, True), (False, True), (True, False)):
        folder = tmp_path / f'{before}{after}'
        first, second = Losses(), Losses()
        stop = dict(by_epoch=True, max_epochs=3, stop_at_iter=7)
        runner_of(folder, before, first, train_cfg=stop).train()
        runner = runner_of(folder, after, second, resume=True)
        runner.train()
        assert first.seen + second.seen == whole.seen
        for name, value in params(runner).items():
            assert torch.equal(value, params(plain)[name]), name


@pytest.mark.parametrize(
    ('settings', 'said'),
    [
        (dict(accumulative_counts=2), r"accumulative_counts=2.*type='OptimWrapper'"),
        (dict(clip_grad=dict(max_norm=3.0)), r"'max_norm': 3.0.*clip_grad.type='each_norm'"),
        (dict(clip_grad=dict(type='norm', max_norm=3.0)), r"clip_grad.type='each_norm'"),
        (dict(precision='fp16'), "fp16 skips.*use precision='bf16'"),
    ],
)
def test_what_needs_whole_gradients_is_refused(settings, said):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f'OptimizerInBackwardOptimWrapper.*{said}'):
        OptimizerInBackwardOptimWrapper(optimizer, **settings)


def _ddp_rank(rank, world_size):
    model, data = model_and_batch(SimCLR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match='DistributedDataParallel.*fully_shard'):
        run_step(MMDistributedDataParallel(model), data, OptimizerInBackwardOptimWrapper(optimizer))
    return all(p.grad is None for p in model.parameters())


def test_ddp_is_refused_before_a_forward():
    assert run_ranks(1, _ddp_rank) == [True]


@pytest.mark.parametrize('name', ['optimizer_in_backward', 'adamw_bf16', 'adamw_8bit'])
def test_base_config_takes_the_place_of_a_schedule(name, tmp_path):
    quick = Config.fromfile(ROOT / 'configs/classify_vit.py')
    own = {key: value for key, value in quick.to_dict().items() if key != 'optim_wrapper'}
    (tmp_path / 'own.py').write_text('\n'.join(f'{key} = {value!r}' for key, value in own.items()))
    (tmp_path / 'run.py').write_text(
        f"_base_ = ['own.py', '{ROOT}/configs/_base_/techniques/{name}.py']\n"
        'optim_wrapper = dict(optimizer=dict(lr=0.02))\n'
    )
    cfg = load_config(tmp_path / 'run.py')
    check_config(cfg)
    assert cfg.optim_wrapper.optimizer.lr == 0.02
