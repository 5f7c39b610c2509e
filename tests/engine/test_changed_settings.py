"""A run that is resumed takes what its config has changed of the optimiser, or says why not."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapperDict, StepLR

from memengine.engine.config.base_files import UNKNOWN, values_in_dump
from memengine.engine.optim import OptimWrapper
from memengine.engine.runner.changed_settings import changed_settings, param_groups
from tests.engine.toy import Losses, params, toy_runner

ADAMW = dict(type='AdamW', lr=0.05, weight_decay=0.1)
SCHEDULES = {
    'none': None,
    'cosine': [dict(type='CosineAnnealingLR', eta_min=0.01, convert_to_iter_based=True)],
    'several': [
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=4),
        dict(type='MultiStepLR', milestones=[1, 2]),
        dict(type='CosineWeightDecay', end_value=0.4, by_epoch=False),
        dict(type='CosineAnnealingMomentum', eta_min=0.5, by_epoch=False),
    ],
}


class Settings(Hook):
    """Keeps what each iteration was taken with."""

    def __init__(self):
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        groups = runner.optim_wrapper.param_groups
        kept = [(g['lr'], g['weight_decay'], g['betas'], g['eps']) for g in groups]
        self.seen.append((runner.iter, kept))


def run(work_dir, schedule='cosine', optimizer=ADAMW, hook=None, stop=None, **kwargs):
    """A toy's run whose config is whole."""
    wrapper = dict(optimizer=optimizer, paramwise_cfg=kwargs.pop('paramwise', None))
    wrapper['accumulative_counts'] = kwargs.pop('counts', 1)
    schedule = SCHEDULES.get(schedule, schedule) if isinstance(schedule, str) else schedule
    runner = toy_runner(
        work_dir,
        cfg=dict(optim_wrapper=wrapper, param_scheduler=schedule),
        optim_wrapper=wrapper,
        param_scheduler=schedule,
        custom_hooks=[hook] if hook else None,
        train_cfg=dict(by_epoch=True, max_epochs=3, stop_at_iter=stop),
        **kwargs,
    )
    runner.train()
    return runner


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('paramwise', [None, dict(bias_lr_mult=2.0, norm_decay_mult=0.0)])
@pytest.mark.parametrize('stop', [3, 10, 12])
def test_a_changed_setting_holds_and_schedules_go_on(tmp_path, capfd, schedule, stop, paramwise):
    lower = dict(ADAMW, lr=0.002, weight_decay=0.3, eps=1e-6)
    whole, rest = Settings(), Settings()
    run(tmp_path / 'whole', schedule, lower, whole, paramwise=paramwise)
    run(tmp_path / 'parts', schedule, stop=stop, paramwise=paramwise)
    run(tmp_path / 'parts', schedule, lower, rest, paramwise=paramwise, resume=True)
    assert rest.seen == whole.seen[stop:]
    said = capfd.readouterr().out
    for change in (
        'lr from 0.05 to 0.002',
        'weight_decay from 0.1 to 0.3',
        'eps from its default to 1e-06',
    ):
        assert f'optim_wrapper.optimizer.{change}' in said


@pytest.mark.parametrize('last', [11, -1])
def test_an_update_is_the_mean_of_the_iterations_that_it_has(last):
    parameter = torch.nn.Parameter(torch.zeros(()))
    wrapper = OptimWrapper(torch.optim.SGD([parameter], lr=1.0), accumulative_counts=3)
    wrapper.initialize_count_status(torch.nn.Identity(), 4, last)
    updates = []
    for _ in range(4, 11):
        before = parameter.item()
        wrapper.update_params(parameter)  # its gradient is 1, and so is the mean of any
        if before != parameter.item():
            updates.append(before - parameter.item())
    assert updates == pytest.approx([1.0] * (3 if last > 0 else 2))


def test_another_number_of_iterations_to_an_update_is_said(tmp_path, capfd):
    measured = [dict(type='ReduceOnPlateauLR', monitor='loss')]  # no reason to refuse this change
    run(tmp_path, measured, counts=2, stop=4)
    run(tmp_path, measured, counts=3, resume=True)
    assert 'holds: optim_wrapper.accumulative_counts from 2 to 3' in capfd.readouterr().out


@pytest.mark.parametrize(
    ('first', 'second'),
    [(dict(ADAMW, fused=False), 'AdamWBf16'), (dict(ADAMW, type='AdamWBf16'), 'AdamW')],
)
def test_an_optimiser_that_takes_the_others_state_goes_on_with_it(tmp_path, capfd, first, second):
    whole, rest = Losses(), Losses()
    run(tmp_path / 'whole', optimizer=ADAMW, hook=whole)
    run(tmp_path / 'parts', optimizer=first, stop=7)
    capfd.readouterr()
    runner = run(tmp_path / 'parts', optimizer=dict(ADAMW, type=second), hook=rest, resume=True)
    assert f'type from {first["type"]} to {second}' in capfd.readouterr().out
    states = runner.optim_wrapper.optimizer.state.values()
    half = torch.bfloat16 if second == 'AdamWBf16' else torch.float32
    assert {state['exp_avg'].dtype for state in states} == {half}
    assert {int(state['step']) for state in states} == {runner.iter}
    assert dict(rest.seen) == pytest.approx(dict(whole.seen[7:]), rel=0.02)


def test_settings_of_the_other_optimiser_alone_go_with_it(tmp_path, capfd):
    pytest.importorskip('torchao.optim')
    run(tmp_path, optimizer=dict(ADAMW, foreach=False), stop=7)
    run(tmp_path, optimizer=dict(ADAMW, type='AdamW8bit', block_size=128), resume=True)
    assert 'block_size from its default to 128' in capfd.readouterr().out


@pytest.mark.parametrize('schedule', ['none', [dict(type='MultiStepLR', milestones=[1, 2])]])
def test_a_changed_schedule_holds(tmp_path, schedule):
    whole, rest = Settings(), Settings()
    run(tmp_path / 'whole', schedule, hook=whole)
    run(tmp_path / 'parts', 'several', stop=7)
    run(tmp_path / 'parts', schedule, hook=rest, resume=True)
    assert rest.seen == whole.seen[7:]


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('spelling', [{}, dict(amsgrad=False)])
def test_what_means_the_same_goes_on_bit_for_bit(tmp_path, capfd, schedule, spelling):
    whole, first, second = Losses(), Losses(), Losses()
    final = params(run(tmp_path / 'whole', schedule, hook=whole))
    run(tmp_path / 'parts', schedule, hook=first, stop=7)
    capfd.readouterr()
    runner = run(tmp_path / 'parts', schedule, {**ADAMW, **spelling}, second, resume=True)
    assert first.seen + second.seen == whole.seen
    assert all(torch.equal(value, final[name]) for name, value in params(runner).items())
    assert bool(spelling) == ('other settings' in capfd.readouterr().out)


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (dict(optimizer=dict(ADAMW, type='SGD')), 'type from AdamW to SGD.*load_from without'),
        (
            dict(optimizer=dict(ADAMW, amsgrad=True)),
            'amsgrad from its default to True.*state lacks',
        ),
        (dict(paramwise=dict(bias_lr_mult=2.0)), 'optim_wrapper.paramwise_cfg.*other groups'),
        (dict(schedule=[dict(type='ReduceOnPlateauLR', monitor='x')]), 'ReduceOnPlateauLR.*meas'),
    ],
)
def test_what_the_state_does_not_go_with_is_refused(tmp_path, change, said):
    run(tmp_path, stop=3)
    steps = Losses()
    with pytest.raises(ValueError, match=said):
        run(tmp_path, **change, hook=steps, resume=True)
    assert steps.seen == []


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        (dict(bias_lr_mult=2.0), dict(bias_lr_mult=3.0)),
        (dict(custom_keys={'0.weight': dict(lr_mult=2.0)}), dict(custom_keys={'0.weight': {}})),
    ],
)
def test_rates_of_the_same_groups_hold(tmp_path, first, second):
    whole, rest = Settings(), Settings()
    run(tmp_path / 'whole', paramwise=second, hook=whole)
    run(tmp_path / 'parts', paramwise=first, stop=7)
    run(tmp_path / 'parts', paramwise=second, hook=rest, resume=True)
    assert rest.seen == whole.seen[7:]


def test_other_words_for_the_same_are_no_change(tmp_path, capfd):
    run(tmp_path, paramwise=None, stop=3)
    capfd.readouterr()
    run(tmp_path, optimizer=dict(ADAMW, type='torch.optim.AdamW'), paramwise={}, resume=True)
    assert 'other settings' not in capfd.readouterr().out


def test_groups_that_fall_together_are_refused(tmp_path):
    paramwise = dict(bias_decay_mult=0.0, norm_decay_mult=0.5)
    run(tmp_path, paramwise=paramwise, stop=3)
    with pytest.raises(ValueError, match='weight_decay puts parameters into other groups'):
        run(tmp_path, optimizer=dict(ADAMW, weight_decay=0.0), paramwise=paramwise, resume=True)


def of_two_optimizers(rates):
    """A run of two optimisers, one with a momentum of its own, at the end of its first epoch."""
    settings = [dict(type='Adam', lr=rates[0]), dict(type='SGD', lr=rates[1], momentum=0.9)]
    kinds = [torch.optim.Adam, torch.optim.SGD]
    wrappers = OptimWrapperDict(
        **{
            f'w{i}': OptimWrapper(
                kind([torch.nn.Parameter(torch.ones(1))], **{k: its[k] for k in its if k != 'type'})
            )
            for i, (kind, its) in enumerate(zip(kinds, settings, strict=True))
        }
    )
    config = Config(dict(optim_wrapper={f'w{i}': dict(optimizer=settings[i]) for i in range(2)}))
    logger = SimpleNamespace(warning=lambda said: None)
    schedules = {n: [StepLR(wrapper, step_size=1)] for n, wrapper in wrappers.items()}
    return SimpleNamespace(
        optim_wrapper=wrappers,
        param_schedulers=schedules,
        cfg=config,
        train_dataloader=range(3),
        logger=logger,
    )


def test_of_several_optimisers_the_changed_one_is_set():
    before, now = of_two_optimizers([0.1, 0.2]), of_two_optimizers([0.1, 0.3])
    optimizer = before.optim_wrapper.state_dict()
    meta = dict(cfg=before.cfg.pretty_text, iter=3, epoch=1)
    hold = changed_settings(now, dict(meta=meta, optimizer=optimizer), 'epoch_1.pth')
    now.optim_wrapper.load_state_dict(optimizer)
    hold()
    assert [g['lr'] for g in param_groups(now)] == [pytest.approx(0.01), pytest.approx(0.03)]
    assert [g.get('momentum') for g in param_groups(now)] == [None, 0.9]


def test_a_config_that_was_written_out_is_read_without_running_it():
    text = "a=dict(\n    kind=<class 'torch.optim.Adam'>,\n    lr=0.1)\nb = f(1)\nc=<x at 1>\nd=[1]"
    assert values_in_dump(text) == {
        'a': {'kind': 'torch.optim.Adam', 'lr': 0.1},
        'b': UNKNOWN,
        'd': [1],
    }
