"""Validation before training: once, marked as such, and without a trace in training."""

import json

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner as PlainRunner

from memengine.engine import Runner
from tests.engine.hooks.images import image_runner


class Metrics(Hook):
    """Keeps (iteration, metrics) of each validation."""

    def __init__(self):
        self.seen = []

    def after_val_epoch(self, runner, metrics=None):
        self.seen.append((runner.iter, metrics))


def test_the_first_point_of_the_curve(tmp_path):
    metrics = Metrics()
    runner = image_runner(tmp_path, dict(type='EvaluateFirstHook'), metrics)
    runner.train()
    assert [iteration for iteration, _ in metrics.seen] == [0, 6, 12]
    (_, first), *_, (_, last) = metrics.seen
    assert first['knn_top1_untrained'] == first['knn_top1'] == last['knn_top1_untrained']
    assert len({seen['knn_top1'] for _, seen in metrics.seen}) > 1  # training changes it
    assert first['knn_top1_raw_pixels'] == last['knn_top1_raw_pixels']
    (scalars,) = tmp_path.glob('*/vis_data/scalars.json')
    lines = [json.loads(line) for line in scalars.read_text().splitlines()]
    assert [line['step'] for line in lines if 'knn_top1' in line] == [0, 1, 2]


@pytest.mark.parametrize('kind', [Runner, PlainRunner])
def test_training_is_the_same_with_and_without(tmp_path, kind):
    """MMEngine's own Runner does not seed each iteration, so here every draw would show."""
    weights = []
    for hooks in ([], [dict(type='EvaluateFirstHook')]):
        runner = image_runner(tmp_path, *hooks, runner=kind)
        runner.train()
        weights.append(torch.cat([p.flatten() for p in runner.model.parameters()]))
    assert torch.equal(*weights)


def test_without_it_the_untrained_figure_is_left_out(tmp_path):
    metrics = Metrics()
    image_runner(tmp_path, metrics).train()
    assert [set(seen) for _, seen in metrics.seen] == [{'knn_top1', 'knn_top1_raw_pixels'}] * 2


def test_a_resumed_run_remembers_and_does_not_evaluate_again(tmp_path):
    before, after = Metrics(), Metrics()
    first = dict(type='EvaluateFirstHook')
    image_runner(tmp_path, dict(first), before, epochs=1).train()
    runner = image_runner(tmp_path, dict(first), after, epochs=2, resume=True)
    runner.train()
    assert [iteration for iteration, _ in before.seen + after.seen] == [0, 6, 12]
    for name in ('knn_top1_untrained', 'knn_top1_raw_pixels'):
        assert after.seen[0][1][name] == before.seen[0][1][name]
    assert runner.message_hub.get_info('before_training') is False


def test_best_checkpoint_and_early_stopping_take_part(tmp_path):
    runner = image_runner(
        tmp_path,
        dict(type='EvaluateFirstHook'),
        dict(type='EarlyStoppingHook', monitor='knn_top1', rule='greater', patience=5),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', save_best='knn_top1')),
    )
    runner.train()
    assert len(list(tmp_path.glob('best_knn_top1_*.pth'))) == 1


def test_nothing_to_evaluate(tmp_path):
    none = dict(val_dataloader=None, val_cfg=None, val_evaluator=None)
    with pytest.raises(ValueError, match='EvaluateFirstHook.*val_dataloader'):
        image_runner(tmp_path, dict(type='EvaluateFirstHook'), **none).train()
