"""Which checkpoints are kept, and the weights beside them."""

import errno
import multiprocessing
import os
import signal

import pytest
import torch
from mmengine.evaluator import BaseMetric
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from memengine.engine.checkpoint import convert
from memengine.engine.checkpoint.checksums import verify
from memengine.engine.checkpoint.saving import CheckpointWriter, SaveError
from tests.engine.toy import Losses, ToyData, params, toy_runner

KINDS = {
    'file': dict(),
    'file in the background': dict(asynchronous=True),
    'sharded': dict(sharded=True),
    'sharded in the background': dict(sharded=True, asynchronous=True),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


class Scores(BaseMetric):
    """A score for each evaluation, as the test says."""

    def __init__(self, scores):
        super().__init__()
        self.scores = iter(scores)

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        return dict(score=next(self.scores))


def train(folder, scores=None, epochs=5, resume=False, losses=None, load_from=None, **checkpoint):
    evaluated = {}
    if scores:
        evaluated = dict(
            val_dataloader=DataLoader(ToyData(4), 4),
            val_cfg=dict(),
            val_evaluator=[Scores(scores)],
        )
        checkpoint = {'save_best': 'score', 'rule': 'greater', **checkpoint}
    runner = toy_runner(
        folder,
        losses,
        resume=resume,
        load_from=load_from,
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        default_hooks=dict(checkpoint={'interval': 1, **checkpoint}),
        **evaluated,
    )
    runner.logger.error = print
    runner.train()
    return runner


def left(folder):
    suffixes = ('.pth', '.dcp', '.safetensors')
    return sorted(path.stem for path in folder.iterdir() if path.suffix in suffixes)


@pytest.mark.fault(
    'checkpoints would fill the disk',
    '`max_keep_ckpts` keeps the newest, `interval` writes every n-th; what is kept is whole',
)
def test_the_newest_are_kept_and_every_nth_is_written(tmp_path, kind):
    train(tmp_path / 'a', max_keep_ckpts=2, **kind)
    assert left(tmp_path / 'a') == ['epoch_4', 'epoch_5']
    assert all(verify(path) for path in (tmp_path / 'a').glob('epoch_*'))
    train(tmp_path / 'b', interval=2, save_last=False, **kind)
    assert left(tmp_path / 'b') == ['epoch_2', 'epoch_4']


def test_the_best_is_kept_beside_the_newest(tmp_path, kind):
    train(tmp_path, scores=[1, 3, 2, 4, 0], max_keep_ckpts=1, **kind)
    assert left(tmp_path) == ['best_score_epoch_4', 'epoch_5']
    for path in tmp_path.glob('*epoch_*'):
        assert verify(path)


def test_the_best_of_another_run_stays(tmp_path, kind):
    """It is gone on from in another folder: a branch, or a work dir that was copied."""
    options = dict(kind, max_keep_ckpts=1)
    train(tmp_path / 'a', scores=[1.0, 2.0], epochs=2, **options)
    of_the_first = left(tmp_path / 'a')
    newest = next((tmp_path / 'a').glob('epoch_2.*'))
    train(tmp_path / 'b', scores=[3.0], epochs=3, resume=True, load_from=str(newest), **options)
    assert left(tmp_path / 'a') == of_the_first == ['best_score_epoch_2', 'epoch_2']
    assert left(tmp_path / 'b') == ['best_score_epoch_3', 'epoch_3']


def test_the_best_before_a_work_dir_was_moved_is_removed(tmp_path, kind):
    options = dict(kind, max_keep_ckpts=1)
    train(tmp_path / 'a', scores=[1.0, 2.0], epochs=2, **options)
    (tmp_path / 'a').rename(tmp_path / 'b')
    train(tmp_path / 'b', scores=[3.0], epochs=3, resume=True, **options)
    assert left(tmp_path / 'b') == ['best_score_epoch_3', 'epoch_3']


@pytest.mark.fault(
    'the best checkpoint cannot be written', 'the best before it is kept until a new one is whole'
)
def test_the_best_before_is_removed_only_once_the_new_one_is_whole(tmp_path, kind, monkeypatch):
    real, failed = CheckpointWriter.start, []

    def failing(self, write, asynchronous):
        def fail():
            failed.append(1)
            raise SaveError('no room')

        best_of_second = len(left(tmp_path)) == 3 and not failed
        return real(self, fail if best_of_second else write, asynchronous)

    monkeypatch.setattr(CheckpointWriter, 'start', failing)
    train(tmp_path, scores=[1, 2], epochs=2, **kind)
    assert failed
    assert 'best_score_epoch_1' in left(tmp_path)
    monkeypatch.undo()


def test_what_lacks_its_exported_weights_is_removed_in_its_turn(tmp_path, kind, monkeypatch):
    write = convert.save_file

    def full_once(tensors, path, **options):
        if 'epoch_2.' in str(path):
            raise OSError(errno.ENOSPC, 'No space left on device')
        write(tensors, path, **options)

    monkeypatch.setattr(convert, 'save_file', full_once)
    train(tmp_path, epochs=4, max_keep_ckpts=1, export_weights=True, **kind)
    left = {path.name.partition('.')[0] for path in tmp_path.glob('epoch_*')}
    assert left == {'epoch_4'}


def test_weights_are_exported_beside_and_removed_with_their_checkpoints(tmp_path, kind):
    settings = dict(max_keep_ckpts=1, export_weights=True, **kind)
    runner = train(tmp_path, scores=[1, 3, 2], epochs=3, **settings)
    assert left(tmp_path) == ['best_score_epoch_2'] * 2 + ['epoch_3'] * 2
    weights = load_file(tmp_path / 'epoch_3.safetensors')
    for name, value in params(runner).items():
        assert torch.equal(weights[name], value), name
    assert verify(tmp_path / 'epoch_3.safetensors')


def killed_at(sync, folder, kind):
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(1)
        if len(calls) == sync:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync
    train(folder, epochs=4, max_keep_ckpts=1, **kind)


@pytest.mark.fault(
    'killed in a save, in the background or not', 'the one before is whole; resuming is bit for bit'
)
@pytest.mark.parametrize('sync', [2, 9])
def test_killed_in_a_save(tmp_path, kind, sync):
    whole, losses = Losses(), Losses()
    expected = params(train(tmp_path / 'whole', epochs=4, losses=whole))
    run = multiprocessing.get_context('forkserver').Process(  # without threads of autograd
        target=killed_at, args=(sync, tmp_path / 'killed', kind)
    )
    run.start()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    runner = train(
        tmp_path / 'killed', epochs=4, resume=True, losses=losses, max_keep_ckpts=1, **kind
    )
    assert losses.seen == whole.seen[-len(losses.seen) :]
    assert losses.seen[0][0] % 5 == 0
    for name, value in params(runner).items():
        assert torch.equal(value, expected[name]), name
    outdated = {'epoch_1'}  # is left if the kill came just before it was removed
    assert {'epoch_4'} <= {*left(tmp_path / 'killed')} <= {'epoch_4'} | outdated
    assert not list((tmp_path / 'killed').glob('.*'))


@pytest.mark.parametrize('named', ['scores', ['score', 'top1']])
def test_a_best_by_a_metric_that_there_is_not_names_those_there_are(tmp_path, named):
    said = (
        f"save_best: no metric is called '{named if named == 'scores' else 'top1'}'.*gives score:"
    )
    with pytest.raises(ValueError, match=said):
        train(tmp_path, scores=[1.0], save_best=named)
    assert left(tmp_path) == ['epoch_1'], 'nothing that was trained is lost'
    train(tmp_path, scores=[1.0, 2.0], epochs=2, resume=True)
    assert 'best_score_epoch_2' in left(tmp_path)


@pytest.mark.parametrize(
    ('counts', 'checkpoint', 'every'),
    [
        (2, dict(interval=1), '10 iterations'),  # of five iterations an epoch
        (4, dict(interval=6, by_epoch=False), '12 iterations'),
        (4, dict(interval=8, by_epoch=False), None),
        (5, dict(interval=1), None),
        (1, dict(interval=3, by_epoch=False), None),
    ],
)
def test_checkpoints_between_two_updates_are_warned_of(tmp_path, counts, checkpoint, every):
    optim = dict(optimizer=dict(type='SGD', lr=0.01), accumulative_counts=counts)
    hooks = dict(checkpoint=checkpoint)
    train_cfg = dict(by_epoch=True, max_epochs=1)
    toy_runner(tmp_path, train_cfg=train_cfg, optim_wrapper=optim, default_hooks=hooks).train()
    (log,) = tmp_path.glob('*/*.log')
    said = [line for line in log.read_text().splitlines() if 'gathered' in line]
    assert len(said) == (every is not None)
    assert all(text.endswith(every) for text in said)
