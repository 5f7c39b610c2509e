"""MMEngine's Runner, made true on today's torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.fileio import join_path
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop, save_checkpoint
from mmengine.runner import Runner as _Runner
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from memengine._torch_private.data_loading import end_workers
from memengine.engine.apply import apply_before_wrapping, apply_to_model, hooks_of_keys, refuse
from memengine.engine.checkpoint.checksums import verify
from memengine.engine.checkpoint.files import (
    CheckpointError,
    DamagedError,
    atomic_write,
    safe_loading,
)
from memengine.engine.checkpoint.latest import find_latest, newest_first
from memengine.engine.checkpoint.saving import CheckpointWriter, SaveError, write_file
from memengine.engine.checkpoint.sharded import SUFFIX, is_sharded
from memengine.engine.checkpoint.sharded_saving import sharded_write
from memengine.engine.checkpoint.state import (
    ShardLayout,
    check_resumable,
    gather_state,
    is_sharded_model,
    key_by_name,
    read_checkpoint,
    run_state,
    samples_per_step,
)
from memengine.engine.checkpoint.weights import (
    advise,
    load_from_options,
    load_weights,
    only_reading,
    select,
)
from memengine.engine.cli.console import describe_run, log_environment, set_up_console
from memengine.engine.config.runner_schema import DEFAULT_HOOK_TYPES
from memengine.engine.data_order import reproducible
from memengine.engine.distributed.launchers import DEFAULT_TIMEOUT_S
from memengine.engine.distributed.processes import cpu_group, init_process_group, local_device_ids
from memengine.engine.distributed.together import together
from memengine.engine.faults.finite_state import each_optim_wrapper, refuse_nonfinite_state
from memengine.engine.faults.ranks import RankWatch, ranks_named
from memengine.engine.faults.work_dir_lock import work_dir_lock
from memengine.engine.faults.workers import (
    BATCH_TIMEOUT_S,
    count_skipped,
    guard_workers,
    samples_named,
)
from memengine.engine.hooks import (
    AlgorithmHook,
    CheckpointHook,
    ExactnessHook,
    NonFiniteHook,
    RandomStateHook,
)
from memengine.engine.step import SlicedModel, unwrap
from memengine.engine.wrappers.disco import DisCoDistributedDataParallel, losses_with_a_group
from memengine.engine.wrappers.fsdp import FullyShardedDataParallel
from memengine.registry import LOOPS, MODEL_WRAPPERS, MODELS, RUNNERS
from memengine.techniques.sharding.materializing import on_meta

__all__ = ['Runner']

# What a rank is doing from a method of its hooks on.
_PLACES = dict(
    before_train_iter='training',
    before_val_iter='evaluation',
    before_test_iter='testing',
    before_save_checkpoint='saving',
)


@runtime_checkable
class InitializesWeights(Protocol):
    """A model that gives its parameters the values that they start from."""

    def init_weights(self) -> None:
        """Called once, before training."""


@runtime_checkable
class ActsAfterInit(Protocol):
    """A model with something to do when parameters that were built without values have some."""

    def after_init(self) -> None:
        """Called once, after the values have been given."""


@RUNNERS.register_module()
class Runner(_Runner):
    """Builds and runs training, validation and testing from one config.

    Takes everything that MMEngine's Runner takes, with these differences:

    * checkpoints are read with torch's safe unpickler (``trusted_globals`` in the config adds to
      what they may contain), are written whole or not at all, and a resumed model must match;
    * ``launcher='pytorch'`` works without a GPU, on gloo;
    * a run that is resumed at any iteration goes on bit for bit as if it had not stopped (on the
      same kind of device), because data order and random numbers follow from the seed and the
      place in training;
    * a wrapper that would do nothing in one process says so or is refused;
    * techniques are applied in the order that :mod:`memengine.engine.apply` writes down.

    Raises:
        ValueError: For settings that contradict each other or the machine, naming the setting.
    """

    _has_loaded: bool
    _load_from: Any
    _train_loop: Any
    _val_loop: Any
    _test_loop: Any
    optim_wrapper: Any
    param_schedulers: Any

    def __init__(self, *args: Any, default_scope: str = 'memengine', **kwargs: Any) -> None:
        self._writer = CheckpointWriter()
        self._watch: RankWatch | None = None  # of one rank among several
        super().__init__(*args, default_scope=default_scope, **kwargs)

    @classmethod
    def from_cfg(cls, cfg: Any) -> Runner:
        """Build a runner from a config; without a ``default_scope`` it is memengine's."""
        cfg = copy.deepcopy(cfg)
        cfg = cfg if isinstance(cfg, Config) else Config(cfg)
        # MMEngine's own layout stays; yapf's, at every start and in every checkpoint, takes longer
        # than to write it.
        object.__setattr__(cfg, '_format_python_code', False)
        cfg.setdefault('default_scope', 'memengine')
        return super().from_cfg(cfg)

    def setup_env(self, env_cfg: dict[str, Any]) -> None:
        """Join the process group on whatever device there is, then do as MMEngine does."""
        if self.distributed:
            init_process_group(self.launcher, env_cfg.get('dist_cfg', {}))
        super().setup_env(env_cfg)
        if dist.is_initialized() and dist.get_world_size() > 1:
            timeout_s = env_cfg.get('dist_cfg', {}).get('timeout', DEFAULT_TIMEOUT_S)
            self._watch = RankWatch(timeout_s)

    def set_randomness(self, seed: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Seed the run; a seed that is drawn goes into the config that the run writes out."""
        super().set_randomness(seed, *args, **kwargs)
        if seed is None:
            self.cfg.randomness = {**self.cfg.get('randomness', {}), 'seed': self.seed}

    def build_logger(self, *args: Any, **kwargs: Any) -> Any:
        """Build the run's logger; ``console`` in the config says how much it says there."""
        logger = super().build_logger(*args, **kwargs)
        set_up_console(logger, self.cfg.get('console', 'normal'))
        return logger

    def _log_env(self, env_cfg: dict[str, Any]) -> None:
        log_environment(self)

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader | dict[str, Any],
        seed: int | None = None,
        diff_rank_seed: bool = False,
    ) -> DataLoader:
        """A data loader whose order and augmentations follow from ``seed`` alone."""
        if isinstance(dataloader, dict) and seed is not None:
            dataloader = reproducible(dataloader, seed, diff_rank_seed)
        if isinstance(dataloader, dict) and dataloader.get('num_workers', 0):
            dataloader = {'timeout': BATCH_TIMEOUT_S, **dataloader}
        return guard_workers(_Runner.build_dataloader(dataloader, seed, diff_rank_seed))

    def build_train_loop(self, loop: Any) -> Any:
        """Build the training loop; without a ``type`` it is one of memengine's."""
        if isinstance(loop, dict) and 'type' not in loop:
            loop = dict(loop)
            by_epoch = loop.pop('by_epoch', 'max_epochs' in loop)
            loop['type'] = LOOPS.get('EpochBasedTrainLoop' if by_epoch else 'IterBasedTrainLoop')
        return super().build_train_loop(loop)

    def build_model(self, model: nn.Module | dict[str, Any]) -> nn.Module:
        """Build the model, without values (on the meta device) if its wrapper will give them."""
        is_meta = (self.cfg.get('model_wrapper_cfg') or {}).get('meta', False)
        if is_meta and isinstance(model, dict) and model.get('data_preprocessor'):
            built = MODELS.build(model['data_preprocessor'])  # its values are the config's
            model = {**model, 'data_preprocessor': built}
        with on_meta() if is_meta else nullcontext():
            return super().build_model(model)

    def wrap_model(self, model_wrapper_cfg: dict[str, Any] | None, model: nn.Module) -> nn.Module:
        """Put the model on its device and into its wrapper; nothing is ignored silently."""
        if is_model_wrapper(model):
            return super().wrap_model(model_wrapper_cfg, model)
        config = {'type': 'MMDistributedDataParallel', **(model_wrapper_cfg or {})}
        kind = config['type']
        wrapper = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
        if wrapper is None:
            raise ValueError(f"model_wrapper_cfg.type: there is no model wrapper '{kind}'")
        is_sharded = self.distributed and issubclass(wrapper, FullyShardedDataParallel)
        if not is_sharded:
            model = model.to(get_device())  # first: what replaces modules asks where they are
        apply_before_wrapping(model, self.cfg)
        is_ddp = issubclass(wrapper, nn.parallel.DistributedDataParallel)
        if not self.distributed:
            if model_wrapper_cfg is not None:
                self._warn_unused_wrapper(kind, wrapper, is_ddp, model)
            return super().wrap_model(None, model)
        if is_sharded:
            wrapped = self._shard_model(config, wrapper, model)
        else:
            if is_ddp:
                unused = self.cfg.get('find_unused_parameters', False)
                config.setdefault('find_unused_parameters', unused)
                config.setdefault('device_ids', local_device_ids())
                if model_wrapper_cfg is None:
                    config['broadcast_buffers'] = False
            wrapped = MODEL_WRAPPERS.build(config, default_args=dict(module=model))
        self._warn_of_local_losses(unwrap(wrapped))
        return wrapped

    def _warn_unused_wrapper(self, kind: Any, wrapper: Any, is_ddp: bool, model: nn.Module) -> None:
        """Warn of a wrapper in one process, or refuse one whose effect is missed there."""
        if not is_ddp:
            raise ValueError(
                f"model_wrapper_cfg: '{kind}' needs several processes, but launcher='none' starts "
                'one; start with torchrun and --launcher pytorch (to offload on one GPU with '
                '--nproc_per_node 1), or remove model_wrapper_cfg'
            )
        why = 'there is nothing to synchronise'
        if issubclass(wrapper, DisCoDistributedDataParallel):
            why = f'{", ".join(wrapper.find_losses(model))} sees the whole batch as it is'
        self.logger.warning(
            f"model_wrapper_cfg has no effect in one process (launcher='none'): {why}"
        )

    def _shard_model(self, config: dict[str, Any], wrapper: Any, model: Any) -> nn.Module:
        """Initialise a model while it is whole, and spread it over the ranks."""
        options = {key: value for key, value in config.items() if key != 'type'}
        if not options.get('meta') and isinstance(model, InitializesWeights):
            with self._safe_init_files():
                model.init_weights()
        wrapped = wrapper(module=model, **options)
        if options.get('meta') and isinstance(model, ActsAfterInit):
            model.after_init()
        return wrapped

    def _init_model_weights(self) -> None:
        """Initialise the model, unless that was done before it was spread over the ranks."""
        if not isinstance(self.model, FullyShardedDataParallel):
            with self._safe_init_files():
                super()._init_model_weights()

    def _safe_init_files(self) -> AbstractContextManager[None]:
        """Hold MMEngine's ``Pretrained`` to reading as safely as all else."""
        return safe_loading('A checkpoint of init_cfg', self.cfg.get('trusted_globals', ()))

    def _warn_of_local_losses(self, model: nn.Module) -> None:
        """Say which losses contrast only the samples of their own rank."""
        found = losses_with_a_group(model)
        local = [name for name, loss in found.items() if loss.process_group is None]
        if local and self.world_size > 1:
            self.logger.warning(
                f'{", ".join(local)}: each of the {self.world_size} ranks contrasts only its own '
                'samples with each other, which is another objective than that of the whole batch; '
                "set model_wrapper_cfg.type='DisCoDistributedDataParallel' to contrast the samples "
                'of all ranks'
            )

    def _refuse_lone_samples(self) -> None:
        """Refuse batches of one sample where samples meet in the loss, which is 0 then."""
        model = unwrap(self.model)
        losses = losses_with_a_group(model).values()
        is_local = any(loss.process_group is None for loss in losses)
        fewest = self.world_size if is_local else 1
        if samples_per_step(self) == fewest and isinstance(model, SlicedModel) and model.coupled:
            raise ValueError(
                f'train_dataloader.batch_size=1: in the loss of {type(model).__name__} samples are '
                'compared with each other, so that one alone teaches nothing (the loss is 0); set '
                'it to at least 2'
            )

    def register_default_hooks(self, hooks: dict[str, Any] | None = None) -> None:
        """Register MMEngine's default hooks, memengine's and more; ``name=None`` leaves one out."""
        ours = dict(
            random_state=dict(type=RandomStateHook),
            algorithm=dict(type=AlgorithmHook),
            finite_loss=dict(type=NonFiniteHook),
            exactness=ExactnessHook.of_key(self.cfg.get('verify_exactness')),
            **hooks_of_keys(self.cfg),
        )
        chosen = {**ours, **(hooks or {})}
        for name, hook in chosen.items():
            if isinstance(hook, dict) and 'type' not in hook and name in DEFAULT_HOOK_TYPES:
                chosen[name] = {'type': DEFAULT_HOOK_TYPES[name], **hook}
        mmengines = DEFAULT_HOOK_TYPES.keys() - ours  # which it leaves out itself
        left_out = {n for n, hook in chosen.items() if hook is None and n not in mmengines}
        super().register_default_hooks({k: v for k, v in chosen.items() if k not in left_out})

    def train(self) -> nn.Module:
        """Train from the start or from a checkpoint, to the end that ``train_cfg`` names.

        Raises:
            WorkDirLockedError: While another run is writing into the work dir.
            SaveError: When three checkpoints in a row, or the last one, could not be written.
        """
        if self._train_loop is None:
            raise ValueError(
                'train() needs train_dataloader, train_cfg and optim_wrapper in the config'
            )
        with ExitStack() as held:
            lock = work_dir_lock(Path(self.work_dir), self.logger.warning)
            hold = partial(held.enter_context, lock) if self.rank == 0 else lambda: None
            together(hold, cpu_group('checkpoint'))
            return self._build_and_train()

    def _build_and_train(self) -> nn.Module:
        self._train_loop = self.build_train_loop(self._train_loop)
        self.optim_wrapper = self.build_optim_wrapper(self.optim_wrapper)
        self.scale_lr(self.optim_wrapper, self.auto_scale_lr)
        if self.param_schedulers is not None:
            self.param_schedulers = self.build_param_scheduler(self.param_schedulers)
        if self._val_loop is not None:
            self._val_loop = self.build_val_loop(self._val_loop)
        refuse({**self.cfg, 'launcher': self.launcher}, self.hooks)
        self._refuse_lone_samples()
        self.call_hook('before_run')
        self._init_model_weights()
        apply_to_model(unwrap(self.model), self.logger, self.hooks)
        self.load_or_resume()
        for line in describe_run(self):
            self.logger.info(line)
        self.optim_wrapper.initialize_count_status(
            self.model, self.train_loop.iter, self.train_loop.max_iters
        )
        self._maybe_compile('train_step')
        try:
            with self._faults_named():
                model = self.train_loop.run()
            self.wait_for_checkpoint()
            return model
        finally:
            self.call_hook('after_run')

    def val(self) -> dict[str, float]:
        """Validate, as MMEngine does."""
        with self._faults_named():
            return super().val()

    def test(self) -> dict[str, float]:
        """Test, as MMEngine does."""
        with self._faults_named():
            return super().test()

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call a method of all hooks, as MMEngine does, and note where this rank is."""
        if self._watch is not None and fn_name in _PLACES:
            self._watch.at(f'{_PLACES[fn_name]}, iteration {self.iter}')
        super().call_hook(fn_name, **kwargs)

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        """Have errors name the sample or rank that is at fault; at the end count what was skipped.

        The processes that have loaded data end with it.
        """
        try:
            with ranks_named(self._watch), samples_named(self._loaders):
                yield
        finally:
            for loader in self._loaders().values():
                end_workers(loader)
        for skipped in count_skipped(self._loaders()):
            self.logger.warning(skipped)

    def _loaders(self) -> dict[str, DataLoader]:
        """The data loaders that are built, by the names of their settings."""
        loops = dict(train=self._train_loop, val=self._val_loop, test=self._test_loop)
        return {
            f'{name}_dataloader': loop.dataloader
            for name, loop in loops.items()
            if isinstance(loop, BaseLoop) and isinstance(loop.dataloader, DataLoader)
        }

    def _build_param_scheduler(self, scheduler: Any, optim_wrapper: Any) -> list[Any]:
        """Build schedules, but for those that begin only after training has ended."""
        kept = []
        for config in scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]:
            if isinstance(config, dict):
                by_epoch = config.get('by_epoch', True)
                length = self.max_epochs if by_epoch else self.max_iters
                if config.get('begin', 0) >= length:
                    unit = 'epochs' if by_epoch else 'iterations'
                    self.logger.warning(
                        f'param_scheduler {config["type"]} begins at {config["begin"]} {unit}, but '
                        f'training ends at {length}: it is left out'
                    )
                    continue
            kept.append(config)
        return super()._build_param_scheduler(kept, optim_wrapper)

    def load_or_resume(self) -> None:
        """Load weights or resume, as the config says; say so when there is nothing to resume."""
        if self._has_loaded:
            return
        if self._load_from is not None:
            if not self._resume:
                self.load_checkpoint(**load_from_options(self._load_from))
            elif isinstance(self._load_from, str):
                self.resume(self._load_from)
            else:
                raise ValueError(
                    'resume=True goes on with all of a checkpoint: name it by load_from=PATH, '
                    f'not {self._load_from}'
                )
            self._has_loaded = True
        elif self._resume:
            self._resume_newest()

    def _resume_newest(self) -> None:
        """Go on from the newest checkpoint that is whole; never from scratch if there is any."""
        trusted = self.cfg.get('trusted_globals', ())
        found = newest_first(self.work_dir, trusted, self.logger.warning) if self.rank == 0 else ()
        paths, damaged = iter(found), 0
        while path := together(lambda: next(paths, None), cpu_group('checkpoint'))[0]:
            try:
                self.resume(str(path))
                self._has_loaded = True
                return
            except DamagedError as error:
                self.logger.warning(f'{error}; going on from the checkpoint before it')
                damaged += 1
        if damaged:
            raise CheckpointError(
                f'none of the {damaged} checkpoint(s) in {self.work_dir} is whole; name another '
                'one with --resume PATH, or remove them to train from scratch'
            )
        self.logger.info(
            f'No checkpoint to resume in {self.work_dir}: training starts from scratch.'
        )

    def resume(self, filename: str, *args: Any, **kwargs: Any) -> None:
        """Go on from a checkpoint, on any number of ranks that see as many samples together."""
        self._resume = True  # loading is strict, and reads the optimiser's state too
        super().resume(filename, *args, **kwargs)

    def roll_back(self) -> str | Path | None:
        """Set weights and optimiser back to the last checkpoint's, at the present learning rate.

        All else goes on: iterations, schedules, data. Every rank must call it.

        Returns:
            The checkpoint; None, and nothing is changed, if there is none.
        """
        with suppress(SaveError):  # the CheckpointHook says so at its next
            self.wait_for_checkpoint()
        latest = find_latest(self.work_dir)
        if latest is None:
            return None
        self._verify(str(latest))
        layout = ShardLayout(self.model, self.optim_wrapper, [])
        trusted = self.cfg.get('trusted_globals', ())
        checkpoint = read_checkpoint(str(latest), trusted, layout, with_optimizer=True)
        self.call_hook('before_roll_back', checkpoint=checkpoint)
        unwrap(self.model).load_state_dict(checkpoint['state_dict'])
        groups = [g for w in each_optim_wrapper(self.optim_wrapper) for g in w.param_groups]
        scheduled = [{k: v for k, v in group.items() if k != 'params'} for group in groups]
        self.optim_wrapper.load_state_dict(checkpoint['optimizer'])
        groups = [g for w in each_optim_wrapper(self.optim_wrapper) for g in w.param_groups]
        for group, values in zip(groups, scheduled, strict=True):
            group.update(values)
        return latest

    def load_checkpoint(
        self,
        filename: str,
        map_location: str | Callable[..., Any] = 'cpu',
        strict: bool = False,
        revise_keys: list[tuple[str, str]] = [(r'^module.', '')],  # noqa: B006 (MMEngine's own)
        part: str = '',
        into: str | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint: a file of MMEngine's, a sharded one or a safetensors file.

        Files of MMEngine's are read with torch's safe unpickler.

        Args:
            filename: A path, or a URL as MMEngine takes it.
            map_location: Where tensors go.
            strict: Whether names and shapes must match exactly; always so when resuming. Something
                has to match in any case.
            revise_keys: Pairs of pattern and replacement for names.
            part: Load this module of the checkpoint only, e.g. ``'teacher.backbone'``. Without it
                training takes the one part that is most of the model, where no name fits as it is.
            into: The module of the model that it is loaded into; by default that of the same name.

        Raises:
            CheckpointError: When the file is damaged, wants to run code that is not allowed, or
                does not fit; when it is to be resumed from and is not all of a run.
            FileNotFoundError: When it is not there.
            ValueError: When resuming with another number of samples in a step.
        """
        into = part if into is None else into
        moved = (rf'^{re.escape(part)}\.' if part else '^', f'{into}.' if into else '')
        optim_wrapper = self.optim_wrapper if self._resume else None
        layout = ShardLayout(self.model, optim_wrapper, [*revise_keys, moved])
        trusted = self.cfg.get('trusted_globals', ())
        self._verify(filename)
        checkpoint = read_checkpoint(filename, trusted, layout, self._resume, map_location)
        if not all(isinstance(checkpoint.get(key), dict) for key in ('meta', 'state_dict')):
            raise CheckpointError(f'{filename} is no checkpoint: it has no dicts meta, state_dict')
        checkpoint['meta'].pop('config', None)  # MMEngine would run it as a config, which is code
        if self._resume:
            check_resumable(self, checkpoint, filename)
        names, model = list(checkpoint['state_dict']), unwrap(self.model)
        may_choose = not (self._resume or part or into) and isinstance(self._train_loop, BaseLoop)
        if may_choose and (reading := only_reading(model, names)):
            return self.load_checkpoint(filename, map_location, strict, revise_keys, *reading)
        checkpoint['state_dict'] = select(checkpoint['state_dict'], revise_keys, part, into)
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        try:
            left = load_weights(
                model, checkpoint['state_dict'], filename, into, strict or self._resume
            )
        except CheckpointError as error:
            if not may_choose:
                raise
            raise CheckpointError(f'{error}{advise(model, names, filename)}') from error
        self._has_loaded = True
        which = f', its {part or "weights"} into {into or "the model"}' if part or into else ''
        self.logger.info(f'Load checkpoint from {filename}{which}')
        if left:
            self.logger.warning(f'{filename}: {left}')
        return checkpoint

    def _verify(self, filename: str) -> None:
        """Compare a checkpoint with its checksum; ranks share the work."""
        if '://' in filename:
            return
        share = slice(self.rank, None, self.world_size)
        known = together(lambda: verify(filename, share), cpu_group('checkpoint'))
        if not all(known):
            self.logger.info(f'{filename} has no checksum: it is read as it is')

    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: dict[str, Any] | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: dict[str, Any] | None = None,
        by_epoch: bool = True,
        backend_args: dict[str, Any] | None = None,
        asynchronous: bool = False,
        on_complete: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """Save a checkpoint, whole or not at all (in local folders). Every rank must call it.

        Args:
            out_dir: The folder to write to.
            filename: ``'x.pth'`` is a file as MMEngine writes it; ``'x.dcp'`` is a sharded one.
            file_client_args: MMEngine's old name for ``backend_args``.
            save_optimizer: Whether the optimiser's state is in it.
            save_param_scheduler: Whether the schedules' state is in it.
            meta: What else to note; ``epoch`` and ``iter`` are those done.
            by_epoch: Whether this is after an epoch or after an iteration, where ``meta`` does
                not say it.
            backend_args: Of MMEngine's storage, for remote folders.
            asynchronous: Copy it to host memory, and write it in the background.
            on_complete: Called on rank 0 once the checkpoint is whole.

        Returns:
            What waits until it is whole.

        Raises:
            NonFiniteError: When a weight, or what the optimiser holds, is NaN or infinite on any
                rank; nothing is written then.
            SaveError: On all ranks, when one cannot write; asynchronous, by what is returned.
        """
        refuse_nonfinite_state(unwrap(self.model), self.optim_wrapper if save_optimizer else None)
        done = dict(epoch=self.epoch + by_epoch, iter=self.iter + (not by_epoch))
        samples = dict(samples_per_step=samples_per_step(self))
        meta = {**done, **samples, **(meta or {})}
        path, remote = Path(out_dir) / filename, '://' in str(out_dir)
        if not Path(self.work_dir).is_dir():
            self.logger.error(
                f'work_dir {self.work_dir} is not there any more: was it moved? It is made again '
                'for the next checkpoints; to go on from one of the others, move it back'
            )
        if is_sharded(filename):
            if remote:
                raise ValueError(f'sharded checkpoints need a folder to write to, got {out_dir}')
            state = run_state(self, meta, save_optimizer, save_param_scheduler)
            if save_optimizer:
                state['optimizer'] = key_by_name(state['optimizer'], self.model, self.optim_wrapper)
            write = sharded_write(path, state, asynchronous, on_complete)
        else:
            whole: dict[str, Any] = {}
            if self.rank == 0 or is_sharded_model(self.model):  # whose shards all put together
                state = run_state(self, meta, save_optimizer, save_param_scheduler)
                whole = gather_state(state, copies=asynchronous)

            def write() -> None:
                if self.rank:
                    return
                if remote:
                    url = join_path(out_dir, filename, backend_args=backend_args)
                    save_checkpoint(whole, url, file_client_args, backend_args)
                else:
                    write_file(path, whole)
                if on_complete is not None:
                    on_complete()

        wait = self._writer.start(write, asynchronous)
        if not asynchronous:
            wait()
        return wait

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint, which may be written in the background, is whole.

        Raises:
            SaveError: On all ranks, when one could not write it.
        """
        self._writer.wait()

    @property
    def checkpoint_suffix(self) -> str:
        """``'.dcp'`` if the run's CheckpointHook writes sharded checkpoints, else ``'.pth'``."""
        hooks = [hook for hook in self.hooks if isinstance(hook, CheckpointHook)]
        sharded = any(hook.sharded for hook in hooks)
        return SUFFIX if sharded else '.pth'

    def mark_last_checkpoint(self, path: str | Path) -> None:
        """Make ``path`` what ``--resume`` goes on from."""
        if self.rank == 0:
            with atomic_write(Path(self.work_dir) / 'last_checkpoint') as unfinished:
                unfinished.write_text(str(path))
