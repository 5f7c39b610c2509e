"""When checkpoints are written and removed, and in which form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mmengine.dist import master_only
from mmengine.hooks import CheckpointHook as _CheckpointHook

from memengine.engine.checkpoint.files import safe_loading
from memengine.registry import HOOKS
from memengine.suggest import did_you_mean

__all__ = ['CheckpointHook']


@runtime_checkable
class _MarksCheckpoints(Protocol):
    """memengine's Runner; MMEngine's own cannot write in the background or in shards."""

    mark_last_checkpoint: Callable[[str], None]
    save_checkpoint: Callable[..., None]
    message_hub: Any


def _signature() -> inspect.Signature:
    """MMEngine's arguments and ours, without its ``**kwargs``, of which nothing comes."""
    theirs = inspect.signature(_CheckpointHook).parameters.values()
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
        for name in ('sharded', 'asynchronous')
    ]
    return inspect.Signature([p for p in theirs if p.kind is not p.VAR_KEYWORD] + ours)


@HOOKS.register_module()
class CheckpointHook(_CheckpointHook):
    """MMEngine's CheckpointHook, which can also write sharded checkpoints, and in the background.

    Old checkpoints are removed only once the new one is whole.

    Args:
        sharded: Write folders ``epoch_3.dcp``, each rank its share, instead of files
            ``epoch_3.pth``, for which rank 0 gathers all. The work dir has to be a folder that
            all ranks share. It can be resumed from on another number of ranks.
        asynchronous: With ``sharded``: only copy the tensors to host memory, and write while
            training goes on. The best checkpoint (``save_best``) is not written so.
        **kwargs: As of MMEngine's hook.

    Raises:
        ValueError: For settings that do not go together.
        TypeError: For a setting that there is not, which MMEngine's hook would take and pass on.

    Cost: a copy of all that a rank holds, in host memory, while it is being written in the
    background; on the wire only the list of what is written, or all shards for ``epoch_3.pth``.
    """

    filename_tmpl: str
    __signature__ = _signature()  # what the config's check goes by

    def __init__(
        self, *args: Any, sharded: bool = False, asynchronous: bool = False, **kwargs: Any
    ):
        known = self.__signature__.parameters.keys()
        for name in kwargs.keys() - known:
            raise TypeError(f"CheckpointHook has no setting '{name}'{did_you_mean(name, known)}")
        if asynchronous and not sharded:
            raise ValueError('asynchronous=True writes sharded checkpoints only: set sharded=True')
        if sharded and kwargs.get('published_keys') is not None:
            raise ValueError(
                'published_keys picks entries of a .pth file; with sharded=True leave it out, and '
                'turn a checkpoint into one file with: memengine convert'
            )
        super().__init__(*args, **kwargs)
        if sharded:
            self.filename_tmpl = str(Path(self.filename_tmpl).with_suffix('.dcp'))
        if asynchronous:
            self.args['asynchronous'] = True
        self.sharded = sharded

    def before_train(self, runner: Any) -> None:
        """Refuse what MMEngine's own Runner cannot write."""
        if self.sharded and not isinstance(runner, _MarksCheckpoints):
            raise ValueError(
                "CheckpointHook: sharded=True needs memengine's Runner, got "
                f'{type(runner).__module__}.{type(runner).__name__}'
            )
        super().before_train(runner)

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict[str, Any]) -> None:
        """Write a checkpoint, then point to it, and then remove the one that is outdated."""
        if not isinstance(runner, _MarksCheckpoints):
            super()._save_checkpoint_with_step(runner, step, meta)
            return
        outdated = None
        if self.max_keep_ckpts > 0 and step not in list(self.keep_ckpt_ids)[-1:]:
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                outdated = self._path(self.keep_ckpt_ids.popleft())
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
        self.last_ckpt = path = self._path(step)
        runner.message_hub.update_info('last_ckpt', path)

        def on_complete() -> None:
            runner.mark_last_checkpoint(path)
            if outdated is not None:
                self._remove(outdated)

        runner.save_checkpoint(
            self.out_dir,
            self.filename_tmpl.format(step),
            self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            on_complete=on_complete,
            **self.args,
        )

    def _path(self, step: int) -> str:
        return self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(step))

    def _remove(self, path: str) -> None:
        if self.file_backend.isdir(path):
            self.file_backend.rmtree(path)
        elif self.file_backend.isfile(path):
            self.file_backend.remove(path)

    @master_only
    def _publish_model(self, runner: Any, ckpt_path: str) -> None:
        with safe_loading(ckpt_path, runner.cfg.get('trusted_globals', ())):
            super()._publish_model(runner, ckpt_path)
