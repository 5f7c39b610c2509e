"""MMEngine's Runner, made true on today's torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop
from mmengine.runner import Runner as _Runner
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from memengine._torch_private.data_loading import end_workers
from memengine.engine.checkpoint.files import atomic_write, remove_unfinished
from memengine.engine.checkpoint.saving import CheckpointWriter, SaveError, save_errors
from memengine.engine.checkpoint.sharded import SUFFIX
from memengine.engine.checkpoint.state import samples_per_step
from memengine.engine.cli.console import describe_run, log_environment, set_up_console
from memengine.engine.config.memory_budget import keep_budget
from memengine.engine.config.schema.bounds_of_settings import DEFAULT_HOOK_TYPES
from memengine.engine.data_order import reproducible, train_loader
from memengine.engine.distributed.launchers import DEFAULT_TIMEOUT_S
from memengine.engine.distributed.processes import cpu_group, do_on_all_ranks, init_process_group
from memengine.engine.faults.ranks import RankWatch, ranks_named
from memengine.engine.faults.stopping import TrainingStopped
from memengine.engine.faults.work_dir_lock import is_locked, work_dir_lock
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
from memengine.engine.runner.changed_settings import changed_settings
from memengine.engine.runner.evaluated_classes import follow_training_classes, keep_trained_classes
from memengine.engine.runner.loading import DDP_PREFIX, load, load_or_resume, roll_back
from memengine.engine.runner.saving import collect
from memengine.engine.runner.wrapping import (
    initialize_weights,
    refuse_lone_samples,
    refuse_uncounted,
    refuse_unequal_batches,
    wrap,
)
from memengine.engine.step import unwrap
from memengine.engine.techniques_of_config import apply_to_model, hooks_of_keys, refuse
from memengine.engine.wrappers.fsdp import FullyShardedDataParallel
from memengine.registry import LOOPS, MODELS, RUNNERS
from memengine.techniques.compiling import compile_method
from memengine.techniques.modules.forward_state import accelerators_of
from memengine.techniques.modules.running_statistics import StatisticsOfRank0
from memengine.techniques.sharding.materializing import on_meta

# What a rank is doing from a method of its hooks on.
_STAGE_OF_CALL = dict(
    before_train_iter='training',
    before_val_iter='evaluation',
    before_test_iter='testing',
    before_save_checkpoint='saving',
)


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
    * techniques are applied in one order (:mod:`memengine.engine.techniques_of_config`).

    Raises:
        ValueError: For settings that contradict each other or the machine, naming the setting.
    """

    _has_loaded: bool
    _load_from: Any
    _train_loop: Any
    _train_dataloader: Any
    _val_dataloader: Any
    _val_loop: Any
    _test_loop: Any
    optim_wrapper: Any
    param_schedulers: Any

    def __init__(self, *args: Any, default_scope: str = 'memengine', **kwargs: Any) -> None:
        self._writer = CheckpointWriter()
        self._watch: RankWatch | None = None  # of one rank among several
        self._statistics: StatisticsOfRank0 | None = None  # in an evaluation
        self._loaded_meta: dict[str, Any] = {}  # of the checkpoint
        self.last_checkpoint: str | None = None  # written (rank 0 knows), or gone on from
        with ExitStack() as self._built:
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
        planned = keep_budget(cfg)
        runner = super().from_cfg(cfg)
        if planned:
            runner.logger.info(planned)
        return runner

    def setup_env(self, env_cfg: dict[str, Any]) -> None:
        """Join the process group on whatever device there is, then do as MMEngine does."""
        if self.distributed:
            init_process_group(self.launcher, env_cfg.get('dist_cfg', {}))
        super().setup_env(env_cfg)
        if dist.is_initialized() and dist.get_world_size() > 1:
            timeout_s = env_cfg.get('dist_cfg', {}).get('timeout', DEFAULT_TIMEOUT_S)
            self._watch = RankWatch(timeout_s)
            self._built.enter_context(ranks_named(self._watch))

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

    def dump_config(self) -> None:
        """Write the config into the work dir, unless another run is at work there."""
        if self.rank == 0 and not is_locked(Path(self.work_dir)):
            super().dump_config()

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
        on_gpu = any(d.type == 'cuda' for d in accelerators_of(self.model))
        if on_gpu and isinstance(self._train_dataloader, dict):
            self._train_dataloader = {'pin_memory': True, **self._train_dataloader}
        return super().build_train_loop(loop)

    def build_val_loop(self, loop: Any) -> Any:
        """Build the validation loop; ranks that hold shards need as many batches each."""
        built = super().build_val_loop(loop)
        refuse_uncounted(built, 'val_dataloader')
        refuse_unequal_batches(self.model, built, 'val_dataloader')
        return built

    def build_test_loop(self, loop: Any) -> Any:
        """Build the test loop, as the validation loop."""
        built = super().build_test_loop(loop)
        refuse_uncounted(built, 'test_dataloader')
        refuse_unequal_batches(self.model, built, 'test_dataloader')
        return built

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
        wrapped = wrap(self, model_wrapper_cfg, model)
        return wrapped if self.distributed else super().wrap_model(None, wrapped)

    def _init_model_weights(self) -> None:
        """Initialise the model, unless that was done before it was spread over the ranks."""
        if not isinstance(self.model, FullyShardedDataParallel):
            initialize_weights(self, super()._init_model_weights)

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
        with ranks_named(self._watch), ExitStack() as held:
            lock = work_dir_lock(Path(self.work_dir), self.logger.warning)

            def hold() -> None:
                if self.rank == 0:
                    held.enter_context(lock)
                    remove_unfinished(Path(self.work_dir))
                    self.dump_config()  # over that of a run that was not told to wait in time

            do_on_all_ranks(hold, cpu_group('checkpoint'))
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
        refuse_lone_samples(unwrap(self.model), samples_per_step(self), self.world_size)
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
            with self._samples_named():
                model = self._run_train_loop()
            self.wait_for_checkpoint()
            return model
        finally:
            self.call_hook('after_run')

    def _maybe_compile(self, target: str) -> None:
        """As MMEngine does, but dropout draws what it draws uncompiled."""
        given = self.cfg.get('compile')
        if given is not None and given is not False:
            compile_method(self.model, target, **({} if given is True else given))
            self.logger.info('The model is compiled in its first iterations, which takes a while.')

    def _run_train_loop(self) -> nn.Module:
        try:
            return self.train_loop.run()
        except TrainingStopped:
            self.call_hook('after_train')
            return self.model

    def val(self) -> dict[str, float]:
        """Validate, as MMEngine does."""
        with ranks_named(self._watch), self._samples_named():
            return super().val()

    def test(self) -> dict[str, float]:
        """Test, as MMEngine does."""
        with ranks_named(self._watch), self._samples_named():
            return super().test()

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call a method of all hooks, as MMEngine does, and note where this rank is."""
        if self._watch is not None and fn_name in _STAGE_OF_CALL:
            self._watch.at(f'{_STAGE_OF_CALL[fn_name]}, iteration {self.iter}')
        if fn_name in ('after_val_epoch', 'after_test_epoch'):  # before EMAHook's model goes
            self.end_evaluation()
        super().call_hook(fn_name, **kwargs)
        if fn_name in ('before_val_epoch', 'before_test_epoch'):  # by now it is there
            self._statistics = StatisticsOfRank0(self.model)

    def end_evaluation(self) -> None:
        """Go on with the statistics that this rank's norm layers have gathered."""
        if self._statistics is not None:
            self._statistics.give_back()

    @contextmanager
    def _samples_named(self) -> Iterator[None]:
        """Have errors name the sample that is at fault; at the end count what was skipped.

        The processes that have loaded data end with it.
        """
        try:
            with samples_named(self._loaders):
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
        if not self._has_loaded:
            load_or_resume(self)
        if self._resume and isinstance(self._train_loop, BaseLoop):
            keep_trained_classes(self, self._loaded_meta)
        follow_training_classes(self, self._loaded_meta)

    def resume(self, filename: str, *args: Any, **kwargs: Any) -> None:
        """Go on from a checkpoint, on any number of ranks that see as many samples together.

        What the config has changed of optimisers and schedules since holds.
        """
        self._resume = True  # loading is strict, and reads the optimiser's state too
        is_seed_drawn = self._randomness_cfg.get('seed') is None
        super().resume(filename, *args, **kwargs)
        if is_seed_drawn:
            self._keep_seed()
        self._hold_settings()
        self.last_checkpoint = filename

    def _keep_seed(self) -> None:
        """Draw data by the checkpoint's seed, where the config sets none.

        MMEngine takes the seed, but the data loaders were built by one that was drawn before.
        """
        if isinstance(self._train_dataloader, dict) and isinstance(self._train_loop, BaseLoop):
            self._train_loop.dataloader = train_loader(self, self._train_dataloader)
        if isinstance(self._val_dataloader, dict) and isinstance(self._val_loop, BaseLoop):
            differs = self._randomness_cfg.get('diff_rank_seed', False)
            self._val_loop.dataloader = self.build_dataloader(
                self._val_dataloader, self.seed, differs
            )
        self.cfg.randomness = {**self.cfg.get('randomness', {}), 'seed': self.seed}
        self.dump_config()

    def roll_back(self) -> str | None:
        """Set weights and optimiser back to the last checkpoint's, at the present learning rate.

        That is the last one that this run has written, or has gone on from. All else goes on:
        iterations, schedules, data. Every rank must call it.

        Returns:
            The checkpoint; None, and nothing is changed, if there is none.
        """
        with suppress(SaveError):  # the CheckpointHook says so at its next
            self.wait_for_checkpoint()
        return roll_back(self)

    def load_checkpoint(
        self,
        filename: str,
        map_location: str | Callable[..., Any] = 'cpu',
        strict: bool = False,
        revise_keys: Sequence[tuple[str, str]] = (DDP_PREFIX,),
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
            ValueError: When resuming with another number of samples in a step, or with settings of
                the optimiser that its state does not go with.
        """
        given = (filename, map_location, strict, revise_keys, part, into)
        checkpoint = load(self, *given, self._resume, isinstance(self._train_loop, BaseLoop))
        self._has_loaded, self._loaded_meta = True, checkpoint['meta']
        if self._resume:
            self._hold_settings = changed_settings(self, checkpoint, filename)
        return checkpoint

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
        done = dict(epoch=self.epoch + by_epoch, iter=self.iter + (not by_epoch))
        write = collect(
            self,
            out_dir,
            filename,
            save_optimizer,
            save_param_scheduler,
            {**done, **(meta or {})},
            (file_client_args, backend_args),
            asynchronous,
            on_complete,
        )
        wait = self._writer.start(write, asynchronous)
        if not asynchronous:
            wait()
        return wait

    def save_to_go_on(self, epoch: int, iteration: int) -> str:
        """Save a checkpoint where a run stops, from which ``--resume`` goes on; gives its name.

        Raises:
            NonFiniteError, SaveError: As :meth:`save_checkpoint`.
        """
        name = f'iter_{iteration}{self.checkpoint_suffix}'
        mark = partial(self.mark_last_checkpoint, Path(self.work_dir) / name)
        meta = dict(epoch=epoch, iter=iteration)
        self.save_checkpoint(self.work_dir, name, meta=meta, on_complete=mark)
        for hook in self.hooks:
            if isinstance(hook, CheckpointHook):
                hook.forget_failures(self)
        return name

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
        """Make ``path`` what ``--resume`` goes on from.

        Raises:
            SaveError: When that cannot be noted; it goes on from the one before then.
        """
        if self.rank == 0:
            pointer = Path(self.work_dir) / 'last_checkpoint'
            with save_errors(pointer), atomic_write(pointer) as unfinished:
                unfinished.write_text(str(path))
            self.last_checkpoint = str(path)
