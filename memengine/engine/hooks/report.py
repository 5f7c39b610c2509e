"""Leaves a report in the work dir at the end of training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.hooks import Hook
from torch import Tensor, nn

from memengine.engine.data_order import ReadsStreams
from memengine.engine.faults.finite_state import each_optim_wrapper
from memengine.engine.step import unwrap
from memengine.engine.wrappers.fsdp import FullyShardedDataParallel
from memengine.memory import held_bytes, peak_rss_mib
from memengine.registry import HOOKS

if TYPE_CHECKING:
    from memengine.visualization.over_time import Moments

_SHOWN, _NEIGHBOURS = 6, 5  # images, and neighbours of each: drawing takes a second


@HOOKS.register_module()
class ReportHook(Hook):
    """Writes ``WORK_DIR/report`` after training: curves, a summary, pictures, all in a page.

    ``attention.png`` shows where the backbone (the teacher's, where there is a teacher) looks in
    images of the validation data, of its queries if it has a bank; ``views.png`` what is trained
    on. ``embedding_map.png`` shows where held-out samples lay at a few of the evaluations, and
    ``neighbours.png`` which of them are near each other at the last one: these features are taken
    from the evaluations as they pass, so that nothing is computed for them. What a model or its
    data do not have is left out, and said. Whatever goes wrong here is logged as an error; the
    training and its checkpoints are not touched.

    Args:
        num_images: Number of images, spread evenly over the data; 0 for no pictures of images.
        map_points: Number of held-out samples in the map, about; 0 for no map. On several ranks
            the first one's are taken.

    Cost: a copy of 2 bytes for each value of ``map_points`` features, in a file for each evaluation
    (see :class:`~memengine.visualization.over_time.Moments`); some seconds after training.
    """

    priority = 'LOWEST'  # after the last checkpoint

    def __init__(self, num_images: int = 8, map_points: int = 500) -> None:
        for name, value in (('num_images', num_images), ('map_points', map_points)):
            if value < 0:
                raise ValueError(f'ReportHook: {name} must not be negative, got {value}')
        self.num_images = num_images
        self.map_points = map_points
        self._moments: Moments | None = None

    def before_train(self, runner: Any) -> None:
        """Forget what another training has left in this folder, unless this one goes on from it."""
        if runner.rank == 0 and runner.val_loop is not None and self.map_points:
            self._attempt(self._begin_moments, runner)

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Take the features of a few samples."""
        if (moments := self._moments) is not None:
            self._attempt(lambda _: moments.add(data_batch, outputs), runner)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Write them down."""
        if (moments := self._moments) is not None:
            self._attempt(lambda _: moments.save(runner.iter), runner)

    def after_train(self, runner: Any) -> None:
        """Write the report, on the first rank; a sharded model runs on all of them."""
        everywhere = () if _gather_context(runner.model) is None else (self._write_attention,)
        for write in (
            self._write_curves,
            self._write_attention,
            self._write_views,
            self._write_moments,
            self._write_page,
        ):
            if runner.rank == 0 or write in everywhere:
                self._attempt(write, runner)
        self._moments = None

    def _attempt(self, write: Callable[[Any], None], runner: Any) -> None:
        try:
            write(runner)
        except Exception as error:  # a picture is not worth a training
            runner.logger.error(
                f'The report is not complete: {error} (the training and its checkpoints are '
                'not affected; tools/analysis/report.py draws the curves again)',
                exc_info=True,
            )

    def _write_curves(self, runner: Any) -> None:
        from memengine.visualization.report import write_report

        try:
            write_report(runner.work_dir)
        except FileNotFoundError:
            runner.logger.info(
                'Report: no curves, as nothing was logged in a run that is shorter than '
                'default_hooks.logger.interval'
            )

    def _begin_moments(self, runner: Any) -> None:
        from memengine.visualization.over_time import Moments

        held_out = _held_out(runner.val_loop.dataloader.dataset)
        step = math.ceil(len(held_out) / self.map_points)
        self._moments = Moments(Path(runner.work_dir) / 'report' / 'embedding_map', step)
        if runner.iter == 0:
            self._moments.clear()

    def _write_moments(self, runner: Any) -> None:
        from memengine.visualization.features import class_words, save_nearest
        from memengine.visualization.figures import evenly_chosen
        from memengine.visualization.over_time import save_maps

        moments = [] if self._moments is None else self._moments.read()
        if not moments:
            runner.logger.info('Report: no map of embeddings, as no evaluation gave features')
            return
        folder, dataset = Path(runner.work_dir) / 'report', runner.val_loop.dataloader.dataset
        names = [str(name) for name in getattr(dataset, 'metainfo', {}).get('classes', ())]
        save_maps(moments, folder / 'embedding_map.png', names)
        if not self.num_images:
            return
        last, loader = moments[-1], runner.val_loop.dataloader
        save_nearest(
            last.features,
            evenly_chosen(len(last.places), min(self.num_images, _SHOWN)),
            _NEIGHBOURS,
            lambda rows: self._inputs(runner, loader, last.places[rows], False),
            folder / 'neighbours.png',
            class_words(last.labels, names),
        )

    def _write_views(self, runner: Any) -> None:
        from memengine.visualization.figures import evenly_chosen
        from memengine.visualization.views import save_views, views_of

        loader = runner.train_loop.dataloader
        if not self.num_images or isinstance(loader.dataset.dataset, ReadsStreams):
            return  # a stream would be read from its beginning
        places = evenly_chosen(len(loader.dataset), self.num_images)
        samples = views_of({'inputs': self._inputs(runner, loader, places, True)})
        if samples:
            save_views(samples, Path(runner.work_dir) / 'report' / 'views.png')

    def _write_attention(self, runner: Any) -> None:
        from memengine.visualization.attention import (
            NoAttentionError,
            attention_maps,
            save_attention_figure,
        )
        from memengine.visualization.figures import evenly_chosen

        if not self.num_images:
            return
        backbone = _backbone(unwrap(runner.model))
        if backbone is None or runner.val_loop is None:
            missing = 'model has no backbone' if backbone is None else 'config has no validation'
            runner.logger.info(f'Report: no attention maps, as the {missing}')
            return
        loader = runner.val_loop.dataloader
        held_out = len(_held_out(loader.dataset))
        places = len(loader.dataset) - held_out + evenly_chosen(held_out, self.num_images)
        images = self._inputs(runner, loader, places, False)
        try:
            with (_gather_context(runner.model) or nullcontext)():
                maps = attention_maps(backbone, images)
        except NoAttentionError as error:
            runner.logger.info(f'Report: no attention maps. {error}')
            return
        if runner.rank == 0:
            path = Path(runner.work_dir) / 'report' / 'attention.png'
            save_attention_figure(images, maps, path)

    def _write_page(self, runner: Any) -> None:
        from memengine.visualization.page import write_page

        folder = Path(runner.work_dir) / 'report'
        folder.mkdir(exist_ok=True)
        optimizers = [w.optimizer for w in each_optim_wrapper(runner.optim_wrapper)]
        held = held_bytes(unwrap(runner.model), *optimizers)
        held['process'] = int((peak_rss_mib() or 0) * 2**20)
        (folder / 'memory.json').write_text(json.dumps(held, indent=2) + '\n')
        runner.logger.info(f'Report: {write_page(runner.work_dir)}')

    def _inputs(self, runner: Any, loader: Any, places: Tensor, training: bool) -> Any:
        """Samples of a loader as the model takes them: images [B, C, H, W], or a list of views."""
        batch = loader.collate_fn([loader.dataset[place] for place in places.tolist()])
        preprocessor: Any = unwrap(runner.model).data_preprocessor
        return preprocessor.forward(batch, training)['inputs']  # unchecked: it is not learned from


def _held_out(dataset: Any) -> Any:
    """What is evaluated: the queries of a data set that has a bank, too."""
    return getattr(dataset, 'queries', dataset)


def _gather_context(model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
    """The context in which all ranks may run the model, if its parameters are spread over them."""
    return model.gathered if isinstance(model, FullyShardedDataParallel) else None


def _backbone(model: nn.Module) -> nn.Module | None:
    """The network that makes the features: the teacher's, and what a TimmBackbone holds."""
    teacher = dict(model.named_children()).get('teacher', model)
    backbone = dict(teacher.named_children()).get('backbone')
    return backbone and dict(backbone.named_children()).get('model', backbone)
