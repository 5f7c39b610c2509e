"""Memory and throughput in the log, on the iterations that are logged only."""

import json

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner as PlainRunner
from torch.autograd.graph import saved_tensors_hooks

from memengine.engine import Runner
from memengine.engine.hooks import MemoryHook
from memengine.engine.hooks.batches import count_images
from memengine.memory import SavedBytes, cuda_figures
from memengine.testing import run_ranks
from tests.engine.hooks.images import Classifier, Images, image_runner


class Spy(Hook):
    """Which iterations ran under saved-tensor hooks, from inside of the step."""

    priority = 'LOWEST'

    def __init__(self, model):
        self.metered = []
        self.iter = 0
        model.head.register_forward_hook(self.look)

    def look(self, module, args, output):
        if not torch.is_grad_enabled():
            return
        self.metered += [self.iter] if hooks_are_entered() else []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.iter = runner.iter


def hooks_are_entered():
    """Whether saved-tensor hooks act on what is saved here: hooks cannot be set twice."""
    output = torch.ones(1, requires_grad=True).exp()
    node = output.grad_fn
    try:
        node._raw_saved_result.register_hooks(lambda t: t.detach(), lambda t: t)
    except RuntimeError:
        return True
    return False


def lines_of(work_dir, name='saved_mib'):
    (scalars,) = work_dir.glob('*/vis_data/scalars.json')
    lines = [json.loads(line) for line in scalars.read_text().splitlines()]
    return [line for line in lines if name in line]


def expected_saved_mib():
    """One step of the toy, metered by hand."""
    model, data = Classifier(), Images()
    labels = torch.tensor([0, 1, 2] * 2 + [0, 1])
    with SavedBytes(model) as meter:
        loss = model(data.images[:8].clone(), dict(label=labels), mode='loss')['loss']
        loss.backward()
    return meter.peak_bytes / 2**20


def test_figures_reach_the_log(tmp_path):
    image_runner(tmp_path, dict(type='MemoryHook')).train()
    lines = lines_of(tmp_path)
    assert [line['step'] for line in lines] == [6, 12]  # LoggerHook's, of short epochs
    for line in lines:
        assert line['saved_mib'] == pytest.approx(expected_saved_mib(), rel=1e-6)
        assert 50 < line['rss_mib'] < 50_000
        assert line['images_per_s'] > 0
        assert 'memory_mib' not in line


@pytest.mark.parametrize('kind', [Runner, PlainRunner])
def test_only_logged_iterations_are_metered(tmp_path, kind):
    model = Classifier()
    spy = Spy(model)
    image_runner(
        tmp_path, dict(type='MemoryHook', interval=4), spy, model=model, runner=kind
    ).train()
    assert spy.metered == [0, 3, 6 + 3]  # the first, and the fourth of each epoch of six


def test_the_interval_is_that_of_the_logger(tmp_path):
    model = Classifier()
    spy = Spy(model)
    hooks = dict(logger=dict(type='LoggerHook', interval=2))
    image_runner(
        tmp_path, dict(type='MemoryHook'), spy, model=model, epochs=1, default_hooks=hooks
    ).train()
    assert spy.metered == [0, 1, 3, 5]
    assert [line['step'] for line in lines_of(tmp_path)] == [2, 4, 6]


def test_training_is_the_same(tmp_path):
    weights = []
    for hooks in ([], [dict(type='MemoryHook', interval=1)]):
        runner = image_runner(tmp_path, *hooks)
        runner.train()
        weights.append(torch.cat([p.flatten() for p in runner.model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize('error', [ZeroDivisionError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_no_hooks_entered(tmp_path, error):
    class Failing(Classifier):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            if mode == 'loss':
                raise error
            return super().forward(inputs, data_samples, mode)

    enter = saved_tensors_hooks.__enter__
    runner = image_runner(tmp_path, dict(type='MemoryHook'), model=Failing())
    with pytest.raises(error):
        runner.train()
    assert not hooks_are_entered()
    assert saved_tensors_hooks.__enter__ is enter
    assert 'train_step' not in vars(runner.model)


def test_another_hook_that_raises_leaves_none_either(tmp_path):
    class Failing(Hook):
        priority = 'LOWEST'

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        image_runner(tmp_path, dict(type='MemoryHook'), Failing()).train()
    assert not hooks_are_entered()


def test_throughput_leaves_validation_out(tmp_path, monkeypatch):
    """A clock that only moves in steps (1 s each) and in validation (100 s)."""
    time_s = [0.0]
    monkeypatch.setattr('memengine.engine.hooks.memory.time.perf_counter', lambda: time_s[0])

    class Clock(Hook):
        priority = 'VERY_HIGH'

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            time_s[0] += 1.0

        def after_val_epoch(self, runner, metrics=None):
            time_s[0] += 100.0

    image_runner(
        tmp_path,
        Clock(),
        dict(type='MemoryHook', interval=3),
        dict(type='EvaluateFirstHook'),
        train_cfg=dict(by_epoch=False, max_iters=6, val_interval=2),
        default_hooks=dict(logger=dict(type='LoggerHook', interval=3)),
        log_processor=dict(by_epoch=False),
    ).train()
    assert [line['images_per_s'] for line in lines_of(tmp_path)] == [8.0, 8.0]


def _ranks(rank, world_size, work_dir):
    """Two ranks; the second holds more than the first."""

    class Larger(Classifier):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            losses = super().forward(inputs, data_samples, mode)
            if mode == 'loss' and rank == 1:
                ballast = torch.zeros(2**18, requires_grad=True).exp()  # 1 MiB
                losses['loss'] = losses['loss'] + 0 * ballast.sum()
            return losses

    hook = MemoryHook(interval=1)
    import memengine.engine.hooks.memory as module

    module.rss_mib = lambda: 100.0 * (rank + 1)
    module.time.perf_counter = iter(float(i) for i in range(10**6)).__next__
    runner = image_runner(work_dir, hook, model=Larger(), epochs=1)
    runner.train()
    names = ('saved_mib', 'rss_mib', 'images_per_s')
    return [runner.message_hub.get_scalar(f'train/{name}').current() for name in names]


def test_the_largest_memory_and_the_images_of_all_ranks(tmp_path):
    first, second = run_ranks(2, _ranks, tmp_path)
    assert first == second
    saved_mib, resident_mib, images_per_s = first
    assert 1 < saved_mib < 1.1
    assert resident_mib == 200.0
    assert images_per_s == 16.0  # two ranks, eight images, a second


@pytest.mark.parametrize(
    ('batch', 'images'),
    [
        ({'inputs': torch.zeros(5, 3, 4, 4)}, 5),
        ({'inputs': [torch.zeros(5, 3, 4, 4), torch.zeros(5, 3, 2, 2)]}, 5),  # views
        ({'inputs': [torch.zeros(3, 4, 4)] * 6}, 6),  # images of several sizes
        ((torch.zeros(5, 3), torch.zeros(5)), 5),
        ({'x': torch.zeros(4)}, 8),  # as many as the loader promises
    ],
)
def test_images_in_a_batch(batch, images):
    class Loader:
        batch_size = 8

    assert count_images(batch, Loader) == images


def test_an_interval_that_makes_no_sense():
    with pytest.raises(ValueError, match='MemoryHook: interval must be at least 1, got 0'):
        MemoryHook(interval=0)


@pytest.mark.gpu
def test_on_cuda_the_allocator_is_asked(tmp_path):
    image_runner(tmp_path, dict(type='MemoryHook')).train()
    lines = lines_of(tmp_path, 'memory_mib')
    assert len(lines) == 2 and all('saved_mib' not in line for line in lines)
    assert all(0 < line['memory_mib'] <= line['reserved_mib'] < 1000 for line in lines)
    assert all(line['fragmented_mib'] >= 0 for line in lines)
    assert {line['alloc_retries'] for line in lines} == {cuda_figures()['alloc_retries']}
