"""A small training in processes that can be broken off: what ``tools/soak.py`` does harm to.

Processes are forked from one that has imported everything, as importing takes longer than a small
training; ranks meet through a file. Everything goes through the command line's ``main``.
"""

import os

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch is imported
os.environ.setdefault('TORCH_FR_BUFFER_SIZE', '0')  # torch's list of the last 2,000 collectives

import hashlib
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import sklearn.datasets  # noqa: E402, F401 (here, so that no attempt has to)
from mmengine.hooks import Hook  # noqa: E402

import memengine.datasets  # noqa: E402
import memengine.models  # noqa: E402, F401
from memengine.engine.cli.main import main as memengine_main  # noqa: E402
from memengine.engine.runner import Runner  # noqa: E402, F401
from memengine.registry import HOOKS  # noqa: E402

CONFIG = """
_base_ = '{root}/configs/classify_vit.py'
model = dict(backbone=dict(embed_dim=32, depth=1, proj_drop_rate=0.1))
train_dataloader = dict(batch_size={batch_size}, num_workers=0, persistent_workers=False)
train_cfg = dict(_delete_=True, by_epoch=False, max_iters={iterations}, val_begin={iterations} + 1)
param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=False, T_max={iterations})]
checkpoint = dict(interval=4, by_epoch=False, max_keep_ckpts=3, sharded={sharded})
default_hooks = dict(_delete_=True, checkpoint=dict(type='CheckpointHook', **checkpoint))
del checkpoint
custom_hooks = [dict(type='SoakHook')]
visualizer = dict(type='Visualizer', vis_backends=[])
env_cfg = dict(dist_cfg=dict(backend='gloo', timeout=20))
"""
SAMPLES = 8  # of a step, over all ranks
END_S = 600  # a training of some seconds may be starved on a busy machine


@HOOKS.register_module()
class SoakHook(Hook):
    """Tells the parent process where training is, and notes each loss and the resident memory."""

    priority = 'LOW'  # before the hook that saves
    pipe = -1
    folder = Path()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """An iteration begins."""
        self._tell(runner, b'i')

    def before_save_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        """A save begins."""
        self._tell(runner, b's')

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Note the loss of this rank."""
        pages = int(Path('/proc/self/statm').read_text().split()[1])
        self._note(
            runner, runner.iter, float(outputs['loss']).hex(), pages * os.sysconf('SC_PAGE_SIZE')
        )

    def after_train(self, runner: Any) -> None:
        """Note the weights, if this is the end."""
        if runner.iter == runner.max_iters:
            state = runner.model.state_dict()
            digest = hashlib.sha256(b''.join(t.numpy().tobytes() for t in state.values()))
            self._note(runner, runner.iter, digest.hexdigest(), 0)

    def _tell(self, runner: Any, event: bytes) -> None:
        if runner.rank == 0:
            os.write(self.pipe, event)

    def _note(self, runner: Any, *words: object) -> None:
        with open(self.folder / f'seen_by_{runner.rank}.txt', 'a') as file:
            file.write(' '.join(map(str, words)) + '\n')


class Form(NamedTuple):
    """How a training runs."""

    ranks: int
    suffix: str


FORMS = [Form(ranks, suffix) for ranks in (1, 2) for suffix in ('.pth', '.dcp')]


class Attempt:
    """The processes of a training, from its start or from its last checkpoint on.

    Args:
        form: How it runs.
        folder: Of its config, and for what it has seen.
        work_dir: Of its checkpoints.
        name: Of this attempt, for its log.
    """

    def __init__(self, form: Form, folder: Path, work_dir: Path, name: str) -> None:
        words = ['train', str(folder / 'config.py'), '--work-dir', str(work_dir), '--resume']
        if form.ranks > 1:
            meeting = f'env_cfg.dist_cfg.init_method=file://{folder}/meeting_of_{name}'
            words += ['--launcher', 'pytorch', '--cfg-options', meeting]
        read, write = os.pipe()
        self._events = os.fdopen(read, 'rb', buffering=0)
        self.log = folder / f'{name}.log'
        self.left = [self._fork(rank, form, folder, write, words) for rank in range(form.ranks)]
        self.statuses: list[int] = []
        os.close(write)

    def _fork(self, rank: int, form: Form, folder: Path, write: int, words: list[str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            of_rank = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=form.ranks, MASTER_PORT=0)
            if form.ranks > 1:
                os.environ.update({key: str(value) for key, value in of_rank.items()})
                os.environ['MASTER_ADDR'] = 'localhost'  # asked for, not used
            SoakHook.pipe, SoakHook.folder = write, folder
            status = memengine_main(words)
        finally:
            os._exit(status)

    def reach(self, event: bytes, times: int) -> bool:
        """Wait until something has happened so many times; False if the training ends before."""
        while times > 0:
            ready = select.select([self._events], [], [], 0.05)[0]
            seen = self._events.read(1) if ready else b''
            times -= seen == event
            if not seen and self._has_ended():
                return False
        return True

    def _has_ended(self) -> bool:
        """Note who has ended; whether all have."""
        for pid in list(self.left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.left.remove(pid)
                self.statuses.append(os.waitstatus_to_exitcode(status))
        return not self.left

    def end(self) -> list[int]:
        """Wait for the processes; their statuses.

        Raises:
            AssertionError: When one of them has to be killed.
        """
        until = time.monotonic() + END_S
        while not self._has_ended():
            if time.monotonic() > until:
                for pid in self.left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f'{len(self.left)} processes hang: {self.log}')
            if select.select([self._events], [], [], 0.01)[0]:
                self._events.read(4096)
        return self.statuses
