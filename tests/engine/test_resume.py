"""A run that stops at any iteration and resumes is the run that did not stop."""

import os
import signal

import pytest
import torch
from mmengine.hooks import Hook

from memengine.engine.data_order import Draw, ResumableSampler, derive_seed
from tests.engine.toy import Losses, params, toy_runner

LOOPS = {
    'epochs': dict(by_epoch=True, max_epochs=3),
    'iterations': dict(by_epoch=False, max_iters=15, val_interval=100),
}


def uninterrupted(tmp_path, **kwargs):
    losses = Losses()
    runner = toy_runner(tmp_path / 'whole', losses, **kwargs)
    runner.train()
    return losses.seen, params(runner)


@pytest.mark.parametrize('loop', LOOPS)
@pytest.mark.parametrize('stop', [1, 5, 7, 14])
def test_resume_after_any_iteration_is_bit_exact(tmp_path, loop, stop):
    whole, final = uninterrupted(tmp_path, train_cfg=LOOPS[loop])
    assert len(whole) == 15

    first, second = Losses(), Losses()
    toy_runner(tmp_path / 'parts', first, train_cfg=dict(LOOPS[loop], stop_at_iter=stop)).train()
    runner = toy_runner(tmp_path / 'parts', second, train_cfg=LOOPS[loop], resume=True)
    runner.train()
    assert first.seen + second.seen == whole
    for name, value in params(runner).items():
        assert torch.equal(value, final[name]), name


@pytest.mark.parametrize('workers', [1, 2])
def test_resume_is_bit_exact_with_workers_and_their_number_does_not_matter(tmp_path, workers):
    whole, _ = uninterrupted(tmp_path)
    first, second = Losses(), Losses()
    loader = dict(num_workers=workers, persistent_workers=True)
    stop = dict(LOOPS['epochs'], stop_at_iter=8)
    toy_runner(tmp_path / 'parts', first, train_cfg=stop, loader=loader).train()
    toy_runner(tmp_path / 'parts', second, loader=loader, resume=True).train()
    assert first.seen + second.seen == whole


class Interrupt(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 6:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_where_it_is_and_resume_goes_on(tmp_path):
    whole, final = uninterrupted(tmp_path)
    first, second = Losses(), Losses()
    with pytest.raises(KeyboardInterrupt):
        toy_runner(tmp_path / 'parts', first, custom_hooks=[first, Interrupt()]).train()
    assert len(first.seen) == 7
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    runner = toy_runner(tmp_path / 'parts', second, resume=True)
    runner.train()
    assert first.seen + second.seen == whole
    for name, value in params(runner).items():
        assert torch.equal(value, final[name]), name


def test_checkpoint_hook_by_iterations_resumes_within_an_epoch(tmp_path):
    whole, _ = uninterrupted(tmp_path)
    hooks = dict(checkpoint=dict(type='CheckpointHook', interval=3, by_epoch=False))
    first, second = Losses(), Losses()
    toy_runner(tmp_path / 'parts', first, default_hooks=hooks).train()
    toy_runner(
        tmp_path / 'parts', second, resume=True, load_from=str(tmp_path / 'parts' / 'iter_9.pth')
    ).train()
    assert second.seen == whole[9:]


def test_another_seed_draws_other_batches(tmp_path):
    whole, _ = uninterrupted(tmp_path)
    losses = Losses()
    toy_runner(tmp_path / 'other', losses, randomness=dict(seed=4)).train()
    assert losses.seen != whole


def test_sampler_starts_in_the_middle_and_tells_passes_apart():
    sampler = ResumableSampler([5, 3, 1, 5, 3], dataset_size=3)
    assert list(sampler) == [5, 3, 1, 5, 3]
    assert [draw.epoch for draw in sampler] == [0, 0, 0, 1, 1]
    sampler.set_epoch(7)
    sampler.start = 2
    assert [(int(draw), draw.epoch) for draw in sampler] == [(1, 7), (5, 8), (3, 8)]
    assert len(list(sampler)) == 5, 'the start holds for one pass only'


def test_draw_survives_the_way_to_a_worker():
    import pickle

    draw = pickle.loads(pickle.dumps(Draw(4, 2)))
    assert (draw, draw.epoch) == (4, 2)


def test_seeds_of_neighbours_differ():
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000


@pytest.mark.parametrize(
    ('batch_size', 'said'), [(50, 'batch_size=50.*22'), (0, 'positive integer, got 0')]
)
def test_an_impossible_batch_size_is_refused(tmp_path, batch_size, said):
    with pytest.raises(ValueError, match=said):
        toy_runner(tmp_path, loader=dict(batch_size=batch_size)).train()
