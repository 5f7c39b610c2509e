"""The engine on a GPU (pytest -m gpu)."""

import json

import pytest
import torch

from tests.engine.toy import Losses, params, toy_runner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('precision', ['fp32', 'bf16', 'fp16'])
def test_training_runs_on_the_gpu_and_logs_its_memory(tmp_path, precision):
    optim = dict(optimizer=dict(type='AdamW', lr=0.01), precision=precision)
    losses = Losses()
    hooks = dict(memory=dict(type='MemoryHook'), logger=dict(type='LoggerHook', interval=5))
    runner = toy_runner(tmp_path, losses, optim_wrapper=optim, default_hooks=hooks)
    runner.train()
    assert next(runner.model.parameters()).is_cuda
    assert len(losses.seen) == 15
    (path,) = tmp_path.glob('*/vis_data/scalars.json')
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(row.get('memory_mib', 0) > 0 for row in rows)


def test_resume_on_the_gpu_is_the_uninterrupted_run(tmp_path):
    whole, first, second = Losses(), Losses(), Losses()
    final = toy_runner(tmp_path / 'whole', whole)
    final.train()
    cfg = dict(by_epoch=True, max_epochs=3)
    toy_runner(tmp_path / 'parts', first, train_cfg=dict(cfg, stop_at_iter=7)).train()
    runner = toy_runner(tmp_path / 'parts', second, train_cfg=cfg, resume=True)
    runner.train()
    assert first.seen + second.seen == whole.seen
    for name, value in params(runner).items():
        assert torch.equal(value, params(final)[name]), name
