"""When checkpoints are written and removed, and in which form."""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mmengine.dist import is_main_process, master_only
from mmengine.hooks import CheckpointHook as _CheckpointHook

from memengine.engine.checkpoint.convert import export_weights
from memengine.engine.checkpoint.files import read_pickle
from memengine.engine.checkpoint.saving import SaveError, write_file
from memengine.engine.distributed.processes import group_of_one
from memengine.engine.faults.finite_state import (
    each_optim_wrapper,
    note_failed_checkpoint,
    only_refused,
)
from memengine.engine.optim.optim_wrapper import OptimWrapper
from memengine.registry import HOOKS
from memengine.suggest import did_you_mean

__all__ = ['CheckpointHook']

MAX_FAILED_SAVES = 3
"""In a row; then training ends, as nobody wants to train on for days what is lost in the end."""


@runtime_checkable
class _MarksCheckpoints(Protocol):
    """memengine's Runner; MMEngine's own cannot write in the background or in shards."""

    mark_last_checkpoint: Callable[[str], None]
    save_checkpoint: Callable[..., Callable[[], None]]
    message_hub: Any


def _signature() -> inspect.Signature:
    """MMEngine's arguments and ours, without its ``**kwargs``, of which nothing comes."""
    theirs = inspect.signature(_CheckpointHook).parameters.values()
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
        for name in ('sharded', 'asynchronous', 'export_weights')
    ]
    return inspect.Signature([p for p in theirs if p.kind is not p.VAR_KEYWORD] + ours)


@HOOKS.register_module()
class CheckpointHook(_CheckpointHook):
    """MMEngine's CheckpointHook, which can also write sharded checkpoints, and in the background.

    Outdated checkpoints, the best one before among them, are removed only once the new one is
    whole. When one cannot be written, training goes on; after three in a row it ends. None is
    written when all steps since the last one were refused, as NaN or infinite.

    Args:
        sharded: Write folders ``epoch_3.dcp``, each rank its share, instead of files
            ``epoch_3.pth``, for which rank 0 gathers all. The work dir has to be a folder that
            all ranks share. It can be resumed from on another number of ranks.
        asynchronous: Only copy the tensors to host memory, and write while training goes on. The
            best checkpoint (``save_best``) is not written so.
        export_weights: Write the weights once more beside each checkpoint, as
            ``epoch_3.safetensors``; they are removed with it.
        **kwargs: As of MMEngine's hook.

    Raises:
        ValueError: For settings that do not go together.
        TypeError: For a setting that there is not, which MMEngine's hook would take and pass on.

    Cost: a copy of all that a rank holds, in host memory, while it is being written in the
    background; on the wire only the list of what is written, or all shards for ``epoch_3.pth``.
    """

    filename_tmpl: str
    keep_ckpt_ids: deque[int]
    __signature__ = _signature()  # what the config's check goes by

    def __init__(
        self,
        *args: Any,
        sharded: bool = False,
        asynchronous: bool = False,
        export_weights: bool = False,
        **kwargs: Any,
    ):
        known = self.__signature__.parameters.keys()
        for name in kwargs.keys() - known:
            raise TypeError(f"CheckpointHook has no setting '{name}'{did_you_mean(name, known)}")
        if sharded and kwargs.get('published_keys') is not None:
            raise ValueError(
                'published_keys picks entries of a .pth file; with sharded=True leave it out, and '
                'turn a checkpoint into one file with: memengine convert'
            )
        super().__init__(*args, **kwargs)
        if sharded:
            self.filename_tmpl = str(Path(self.filename_tmpl).with_suffix('.dcp'))
        self.sharded = sharded
        self.asynchronous = asynchronous
        self.export_weights = export_weights
        self._failed_saves = 0
        self._marked: str | None = None  # the last checkpoint that was whole, on rank 0
        # What ends the save that was begun; steps kept and its path, which hold once it is whole;
        # and what was noted as the last checkpoint before.
        self._begun: tuple[Callable[[], object], list[int], str, Any] | None = None

    def before_train(self, runner: Any) -> None:
        """Refuse what MMEngine's own Runner cannot write."""
        ours = self.sharded or self.asynchronous or self.export_weights
        if ours and not isinstance(runner, _MarksCheckpoints):
            raise ValueError(
                "CheckpointHook: sharded, asynchronous and export_weights need memengine's Runner, "
                f'got {type(runner).__module__}.{type(runner).__name__}'
            )
        super().before_train(runner)
        self._look_for_the_best_here()
        if self.export_weights:
            if '://' in self.out_dir:
                raise ValueError(
                    f'CheckpointHook: export_weights=True needs a local out_dir, got {self.out_dir}'
                )
            self._alone = group_of_one()
        self._warn_of_gathered_gradients(runner)

    def _look_for_the_best_here(self) -> None:
        """Take the best checkpoint to lie where this run writes, and not where it was written.

        A run that goes on from another one's checkpoint would remove that one's best, and one whose
        work dir was moved would keep the best before beside its own.
        """
        if not self.save_best:
            return
        several = len(self.key_indicators) > 1
        paths = self.best_ckpt_path_dict if several else self.__dict__
        for name in self.key_indicators if several else ['best_ckpt_path']:
            if paths[name] is not None:
                paths[name] = self.file_backend.join_path(self.out_dir, Path(paths[name]).name)

    def _warn_of_gathered_gradients(self, runner: Any) -> None:
        """Say so where checkpoints fall between two updates: each rank gathers for itself."""
        every = self.interval * (len(runner.train_dataloader) if self.by_epoch else 1)
        wrappers = each_optim_wrapper(runner.optim_wrapper)
        ours = [wrapper for wrapper in wrappers if isinstance(wrapper, OptimWrapper)]
        counts = max((wrapper.accumulative_counts for wrapper in ours), default=1)
        if every > 0 and every % counts:
            runner.logger.warning(
                f'An update takes {counts} iterations (optim_wrapper.accumulative_counts), but a '
                f'checkpoint is written every {every}: gradients that are gathered by then are not '
                'in it, so that a run that goes on from it differs in its next update. Let '
                f'default_hooks.checkpoint write every {lcm(every, counts)} iterations'
            )

    def after_train(self, runner: Any) -> None:
        """Wait for the last checkpoint, and do what MMEngine's hook does then.

        Raises:
            SaveError: When the last one could not be written.
        """
        self._settle(runner)
        if self._failed_saves:
            raise SaveError(
                'training has ended, but its last checkpoint could not be written: see to the '
                f'error above; {_go_on(runner)}'
            )
        super().after_train(runner)

    def forget_failures(self, runner: Any) -> None:
        """Take note that the run, which stops, has saved where it is, whatever failed before."""
        with suppress(SaveError):  # the third in a row, after which one has been written
            self._settle(runner)
        self._failed_saves = 0

    def _save_checkpoint(self, runner: Any) -> None:
        """Save one, unless nothing but refused steps would take the place of an older one."""
        self._settle(runner)
        if only_refused(runner.optim_wrapper):
            latest = runner.message_hub.get_info('last_ckpt') or 'the beginning'
            runner.logger.warning(
                f'No checkpoint is written, as training has come no further since {latest}: steps '
                'were not finite'
            )
            return
        super()._save_checkpoint(runner)

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict[str, Any]) -> None:
        """Write a checkpoint, then point to it, and then remove the one that is outdated."""
        if not isinstance(runner, _MarksCheckpoints):
            super()._save_checkpoint_with_step(runner, step, meta)
            return
        self._settle(runner)
        kept: list[int] = []
        outdated: list[str] = []
        if self.max_keep_ckpts > 0:
            kept = [*(kept for kept in self.keep_ckpt_ids if kept != step), step]
            outdated = [self._path(old) for old in kept[: -self.max_keep_ckpts]]
            kept = kept[-self.max_keep_ckpts :]
            runner.message_hub.update_info('keep_ckpt_ids', kept)
        path, before = self._path(step), runner.message_hub.get_info('last_ckpt')
        runner.message_hub.update_info('last_ckpt', path)
        save = partial(
            runner.save_checkpoint,
            self.out_dir,
            self.filename_tmpl.format(step),
            self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            asynchronous=self.asynchronous,
            on_complete=partial(self._on_complete, runner, path, outdated),
        )
        self._begun = save() if self.asynchronous else save, kept, path, before
        if not self.asynchronous:
            self._settle(runner)

    def _on_complete(self, runner: Any, path: str, outdated: list[str]) -> None:
        """On rank 0, in the background if the checkpoint was written there."""
        try:
            runner.mark_last_checkpoint(path)
        except SaveError:
            if path != runner.last_checkpoint:  # else it took the place of one of this name
                self._remove(path)
            raise
        self._marked = path
        for old in outdated:  # which makes room for what is exported
            self._remove(old)
        self._export(path)

    def _settle(self, runner: Any) -> None:
        """End the save that was begun, and hear on all ranks how it went."""
        if self._begun is None:
            return
        (finish, kept, path, before), self._begun = self._begun, None
        try:
            finish()
        except SaveError as error:
            if self.max_keep_ckpts > 0:
                if path == self._marked:  # it is whole, and only what stands beside it is missing
                    self.keep_ckpt_ids = deque(kept, self.max_keep_ckpts)
                runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
            runner.message_hub.update_info('last_ckpt', before)
            note_failed_checkpoint(runner.optim_wrapper)
            self._count_failure(runner, error)
            return
        self._failed_saves = 0
        self.last_ckpt = path
        if self.max_keep_ckpts > 0:
            self.keep_ckpt_ids = deque(kept, self.max_keep_ckpts)

    def _count_failure(self, runner: Any, error: SaveError) -> None:
        self._failed_saves += 1
        count = f'{self._failed_saves} of {MAX_FAILED_SAVES} failures in a row'
        if self._failed_saves < MAX_FAILED_SAVES:
            runner.logger.error(f'{error}. Training goes on to the next checkpoint ({count}).')
            return
        raise SaveError(
            f'{error}. Training ends ({count}); once this is mended, {_go_on(runner)}'
        ) from error

    def _save_best_checkpoint(self, runner: Any, metrics: dict[str, Any]) -> None:
        """As MMEngine's, but the best one before is removed after the new one is written.

        Raises:
            ValueError: For a name in ``save_best`` that no metric has.
        """
        if not self.save_best:
            return
        if lacking := [key for key in self.key_indicators if key not in {'auto', *metrics}]:
            raise ValueError(
                f'save_best: no metric is called {lacking[0]!r}'
                f'{did_you_mean(lacking[0], metrics, after=";")}; this evaluation gives '
                f'{", ".join(metrics)}: set save_best to one of these, then go on with --resume'
            )
        self._settle(runner)
        several = len(self.key_indicators) > 1
        paths = self.best_ckpt_path_dict if several else self.__dict__
        names = self.key_indicators if several else ['best_ckpt_path']
        before = {name: paths[name] for name in names}
        paths.update(dict.fromkeys(names))  # MMEngine's would remove them first
        info = runner.message_hub.runtime_info
        noted = {key: info[key] for key in info if key.startswith('best_')}
        try:
            super()._save_best_checkpoint(runner, metrics)
        except SaveError as error:
            if self._failed_saves == MAX_FAILED_SAVES:
                raise
            paths.update(before)
            for key in [key for key in info if key.startswith('best_')]:
                del info[key]
            info.update(noted)
            runner.logger.error(f'{error}. The best checkpoint stays the one before.')
            return
        for name, old in before.items():
            if paths[name] is None:
                paths[name] = old
            elif is_main_process():
                self._export(paths[name])
                if old not in (None, paths[name]):
                    self._remove(old)

    def _path(self, step: int) -> str:
        return self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(step))

    def _export(self, path: str) -> None:
        if self.export_weights:
            export_weights(Path(path), _exported(path), self._alone)

    def _remove(self, path: str) -> None:
        _exported(path).unlink(missing_ok=True)
        if self.file_backend.isdir(path):
            self.file_backend.rmtree(path)
        elif self.file_backend.isfile(path):
            self.file_backend.remove(path)

    @master_only
    def _publish_model(self, runner: Any, ckpt_path: str) -> None:
        """As MMEngine's: the entries in ``published_keys``, by the name of their hash."""
        checkpoint = read_pickle(Path(ckpt_path), runner.cfg.get('trusted_globals', ()))
        kept = {key: checkpoint[key] for key in checkpoint if key in (self.published_keys or ())}
        digest = hashlib.sha256(pickle.dumps(kept)).hexdigest()
        target = Path(ckpt_path).with_suffix('')
        target = target.with_name(f'{target.name}-{digest[:8]}.pth')
        write_file(target, kept)
        runner.logger.info(f'The checkpoint ({ckpt_path}) is published to {target}.')


def _go_on(runner: Any) -> str:
    """What to do after a run that could not save; one that was resumed began with a checkpoint."""
    newest = runner.message_hub.get_info('last_ckpt')
    if newest is None:
        return 'begin anew, as no checkpoint has been written'
    return f'go on from the newest checkpoint, {newest}, with --resume'


def _exported(path: str) -> Path:
    return Path(path).with_suffix('.safetensors')
