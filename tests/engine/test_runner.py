"""The Runner: wrappers, devices, precision, schedules; nothing is ignored silently."""

import os

import pytest
import torch
from mmengine.hooks import Hook
from torch import nn

from memengine.engine.faults.finite_state import NonFiniteError
from memengine.testing import assert_same_step, run_ranks
from tests.engine.toy import Losses, ToyData, ToyModel, params, toy_runner


class PlainModel(ToyModel):
    """No dropout, BatchNorm over all ranks: follows one process on any number of ranks."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(2, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.net = nn.Sequential(*layers).double()

    def forward(self, x, y, mode='loss'):
        return super().forward(x.double(), y.double(), mode)


def plain_model():
    torch.manual_seed(0)
    return PlainModel()


def _train_on_a_rank(rank, world_size, work_dir):
    if world_size > 1:  # else this is the tests' own process
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    losses = Losses()
    runner = toy_runner(
        work_dir,
        losses,
        model=plain_model(),
        loader=dict(dataset=ToyData(40), batch_size=8 // world_size),
        launcher='pytorch' if world_size > 1 else 'none',
        cfg=dict(sync_bn='torch'),
    )
    runner.train()
    module = runner.model.module if world_size > 1 else runner.model
    return module.state_dict(), [loss for _, loss in losses.seen]


@pytest.mark.parametrize('world_size', [2, 4])
def test_ranks_of_a_smaller_batch_follow_one_process(tmp_path, world_size):
    expected, losses = _train_on_a_rank(0, 1, str(tmp_path / 'one'))
    results = run_ranks(world_size, _train_on_a_rank, str(tmp_path / 'many'))
    for state, _ in results:
        assert_same_step(state, expected, tolerance=1e-9)
    means = torch.tensor([seen for _, seen in results], dtype=torch.float64).mean(0)
    assert torch.allclose(means, torch.tensor(losses, dtype=torch.float64), rtol=1e-9)
    assert (tmp_path / 'many' / 'epoch_3.pth').exists()


def test_ddp_settings_in_one_process_are_said_to_do_nothing(tmp_path):
    runner = toy_runner(
        tmp_path, log_level='INFO', cfg=dict(model_wrapper_cfg=dict(find_unused_parameters=True))
    )
    assert isinstance(runner.model, ToyModel)
    (log,) = tmp_path.glob('*/*.log')
    assert 'model_wrapper_cfg has no effect in one process' in log.read_text()


def test_a_sharding_wrapper_in_one_process_is_refused(tmp_path):
    wrapper = dict(type='MMFullyShardedDataParallel', cpu_offload=True)
    with pytest.raises(ValueError, match="MMFullyShardedDataParallel.*launcher='none'"):
        toy_runner(tmp_path, cfg=dict(model_wrapper_cfg=wrapper))


def test_pytorch_launcher_without_torchrun_says_what_to_type(tmp_path, monkeypatch):
    for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match='torchrun'):
        toy_runner(tmp_path, launcher='pytorch')


@pytest.mark.parametrize(
    'wrapper',
    [
        dict(type='AmpOptimWrapper', dtype='bfloat16'),
        dict(type='OptimWrapper', precision='bf16'),
        dict(type='OptimWrapper', precision='fp16', loss_scale=128.0),
    ],
)
def test_half_precision_runs_on_any_device(tmp_path, wrapper):
    seen = []

    class Probe(Hook):
        def before_train(self, runner):
            runner.model.net[0].register_forward_hook(lambda *args: seen.append(args[-1].dtype))

    optim = dict(wrapper, optimizer=dict(type='AdamW', lr=0.01))
    runner = toy_runner(tmp_path, optim_wrapper=optim, custom_hooks=[Probe()])
    before = params(runner)
    runner.train()
    half = torch.bfloat16 if 'fp16' not in str(wrapper) else torch.float16
    assert set(seen) == {half}
    assert not torch.equal(before['net.0.weight'], runner.model.net[0].weight)


def test_fp16_scale_survives_a_resume(tmp_path):
    optim = dict(type='OptimWrapper', precision='fp16', optimizer=dict(type='SGD', lr=0.01))
    runner = toy_runner(tmp_path, optim_wrapper=optim, train_cfg=dict(max_epochs=3, stop_at_iter=4))
    runner.train()
    scaler = runner.optim_wrapper.precision.scaler
    scaler.update(2.0)
    runner.save_checkpoint(str(tmp_path), 'iter_4.pth', meta=dict(epoch=0, iter=4))
    resumed = toy_runner(
        tmp_path, optim_wrapper=optim, resume=True, train_cfg=dict(max_epochs=3, stop_at_iter=5)
    )
    resumed.train()
    assert resumed.optim_wrapper.precision.scaler.get_scale() == 2.0


def test_accumulative_counts_is_the_larger_batch(tmp_path):
    def train(name, **kwargs):
        runner = toy_runner(
            tmp_path / name,
            model=_linear_model(),
            param_scheduler=None,
            train_cfg=dict(max_epochs=1),
            **kwargs,
        )
        runner.train()
        return params(runner)

    data = ToyData(40)
    sgd = dict(type='SGD', lr=0.1)
    large = train(
        'large', loader=dict(dataset=data, batch_size=8), optim_wrapper=dict(optimizer=sgd)
    )
    small = train(
        'small',
        loader=dict(dataset=data, batch_size=4),
        optim_wrapper=dict(optimizer=sgd, accumulative_counts=2),
    )
    assert_same_step(small, large, tolerance=1e-9)


class _Linear(ToyModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1).double()

    def forward(self, x, y, mode='loss'):
        return super().forward(x.double(), y.double(), mode)


def _linear_model():
    torch.manual_seed(0)
    return _Linear()


def test_a_loss_that_is_no_number_ends_training(tmp_path):
    optim = dict(optimizer=dict(type='SGD', lr=1e30))
    losses = Losses()
    runner = toy_runner(tmp_path, losses, optim_wrapper=optim, param_scheduler=None)
    runner._train_dataloader['batch_size'] = 2
    with pytest.raises(NonFiniteError, match='optim_wrapper.optimizer.lr'):
        runner.train()
    assert all(loss == loss for _, loss in losses.seen)


def test_a_schedule_beyond_the_end_is_left_out_and_said(tmp_path):
    schedules = [
        dict(type='LinearLR', start_factor=0.1, end=3, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', begin=3, convert_to_iter_based=True),
    ]
    runner = toy_runner(tmp_path, param_scheduler=schedules, train_cfg=dict(max_epochs=1))
    runner.train()
    assert len(runner.param_schedulers) == 1
    (log,) = tmp_path.glob('*/*.log')
    assert 'CosineAnnealingLR begins at 3 epochs, but training ends at 1' in log.read_text()


def test_default_hooks_take_settings_without_a_type_and_can_be_left_out(tmp_path):
    hooks = dict(timer=dict(priority=55), finite_loss=None, checkpoint=None, own=None)
    runner = toy_runner(tmp_path, default_hooks=hooks)
    names = {type(hook).__name__: hook.priority for hook in runner.hooks}
    assert names['IterTimerHook'] == 55
    assert not names.keys() & {'NonFiniteHook', 'CheckpointHook'}


def test_model_hooks_are_called_around_each_update(tmp_path):
    calls = []

    class Model(ToyModel):
        def set_progress(self, progress):
            calls.append(('progress', progress.iter, progress.epoch, progress.max_iters))

        def before_update(self):
            calls.append(('before', self.net[0].weight.grad is not None))

        def after_update(self):
            calls.append(('after',))

    optim = dict(optimizer=dict(type='SGD', lr=0.1), accumulative_counts=2)
    toy_runner(tmp_path, model=Model(), optim_wrapper=optim, train_cfg=dict(max_epochs=1)).train()
    progress = [call for call in calls if call[0] == 'progress']
    assert progress == [('progress', i, 0, 5) for i in range(5)]
    updates = [call for call in calls if call[0] != 'progress']
    assert updates == [('before', True), ('after',)] * 3  # iterations 2, 4 and the last


@pytest.mark.parametrize(
    ('sampler', 'passes'),
    [
        ('DefaultSampler', [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]),  # of 5 batches
        ('InfiniteSampler', [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]),  # of 22 samples
    ],
)
def test_a_model_is_told_of_passes_where_iterations_are_counted(tmp_path, sampler, passes):
    told = []

    class Model(ToyModel):
        def set_progress(self, progress):
            told.append((progress.iter, progress.epoch, progress.max_epochs))

    toy_runner(
        tmp_path,
        model=Model(),
        train_cfg=dict(by_epoch=False, max_iters=12, val_interval=100),
        loader=dict(sampler=dict(type=sampler, shuffle=True)),
        param_scheduler=None,
    ).train()
    assert told == [(number, done, 3) for number, done in enumerate(passes)]


def test_mmengine_examples_accumulate_and_default_scope(tmp_path):
    """The runner of MMEngine's page on saving memory, with the import line changed."""
    from mmengine.model import BaseModel
    from torch.utils.data import DataLoader

    from memengine.engine import Runner

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, img, label, mode):
            feat = self.linear(img)
            return dict(loss1=(feat - label).pow(2), loss2=(feat - label).abs())

    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 50
    model = Model()
    before = (model.linear.weight - 1 + model.linear.bias).abs().item()
    runner = Runner(
        model=model,
        work_dir=str(tmp_path),
        train_dataloader=DataLoader(data, batch_size=2),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01), accumulative_counts=4),
    )
    runner.train()
    assert (model.linear.weight - 1 + model.linear.bias).abs().item() < before


@pytest.mark.parametrize(
    'compiled', [dict(backend='eager'), pytest.param(True, marks=pytest.mark.slow)]
)
def test_compile_takes_the_same_steps(tmp_path, compiled):
    """And drops out the same."""
    seen = []
    for name, cfg in (('plain', {}), ('compiled', dict(compile=compiled))):
        losses, one_epoch = Losses(), dict(by_epoch=True, max_epochs=1)
        toy_runner(tmp_path / name, losses, one_epoch, cfg=cfg).train()
        seen.append([loss for _, loss in losses.seen])
    assert seen[1] and seen[1] == pytest.approx(seen[0], rel=1e-3)
