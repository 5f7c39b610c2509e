"""A checkpoint that one rank cannot write: all ranks hear of it, and go on."""

import os
from pathlib import Path

import pytest

from memengine.engine.checkpoint.saving import CheckpointWriter
from memengine.testing import run_ranks
from tests.engine.toy import Losses, toy_runner

KINDS = {
    'file': dict(),
    'file in the background': dict(asynchronous=True),
    'sharded': dict(sharded=True),
    'sharded in the background': dict(sharded=True, asynchronous=True),
}


def train(rank, world_size, folder, full_rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    start, saves = CheckpointWriter.start, []

    def begin(self, write, asynchronous):
        saves.append(1)
        if len(saves) == 2 and rank == full_rank:
            write = failing(write)
        return start(self, write, asynchronous)

    def failing(write):
        import resource

        def on_full_disk():
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
            try:
                write()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        return on_full_disk

    CheckpointWriter.start = begin
    said = {}
    for name, kind in KINDS.items():
        if full_rank and 'sharded' not in kind:
            continue  # rank 0 writes it alone
        saves.clear()
        losses, errors = Losses(), []
        runner = toy_runner(
            Path(folder) / name,
            losses,
            loader=dict(batch_size=2),
            default_hooks=dict(checkpoint=dict(interval=1, max_keep_ckpts=1, **kind)),
            launcher='pytorch',
        )
        runner.logger.error = errors.append
        runner.train()
        assert len(losses.seen) == 15
        said[name] = errors
    return said


@pytest.mark.slow
@pytest.mark.fault(
    'the disk is full for one rank of two', 'both hear of it and go on; the next save succeeds'
)
@pytest.mark.parametrize('full_rank', [0, 1])
def test_a_full_disk_of_one_rank_is_heard_of_by_all(tmp_path, full_rank):
    of_ranks = run_ranks(2, train, str(tmp_path), full_rank, timeout_s=600)
    for said in of_ranks:
        for name, errors in said.items():
            assert len(errors) == 1 and 'disk is full' in errors[0], (name, errors)
            assert 'epoch_2' in errors[0]
    for name in of_ranks[0]:
        left = [path.stem for path in (tmp_path / name).iterdir() if 'epoch' in path.name]
        assert left == ['epoch_3'], name
