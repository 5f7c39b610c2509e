"""Leaves a report in the work dir at the end of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from torch import Tensor, nn

from memengine.engine.faults.finite_state import each_optim_wrapper
from memengine.engine.step import unwrap
from memengine.engine.wrappers.fsdp import FullyShardedDataParallel
from memengine.memory import held_bytes, peak_rss_mib
from memengine.registry import HOOKS

__all__ = ['ReportHook']


@HOOKS.register_module()
class ReportHook(Hook):
    """Writes ``WORK_DIR/report`` after training: curves, a summary, attention maps, all in a page.

    ``attention.png`` shows where the backbone (the teacher's, where there is a teacher) looks in
    images of the validation data, of its queries if it has a bank. For a model without attention
    over patches the log says so, and there are curves only. Whatever goes wrong here is logged
    as an error; the training and its checkpoints are there already.

    Args:
        num_images: Number of images, spread evenly over the data; 0 for none.
    """

    priority = 'LOWEST'  # after the last checkpoint

    def __init__(self, num_images: int = 8) -> None:
        if num_images < 0:
            raise ValueError(f'ReportHook: num_images must not be negative, got {num_images}')
        self.num_images = num_images

    def after_train(self, runner: Any) -> None:
        """Write the report, on the first rank; a sharded model runs on all of them."""
        everywhere = () if _gather_context(runner.model) is None else (self._write_attention,)
        for write in (self._write_curves, self._write_attention, self._write_page):
            if runner.rank != 0 and write not in everywhere:
                continue
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
        except FileNotFoundError as error:  # a run shorter than the interval of the log
            runner.logger.info(f'Report: no curves. {error}')

    def _write_attention(self, runner: Any) -> None:
        from memengine.visualization.attention import (
            NoAttentionError,
            attention_maps,
            save_attention_figure,
        )

        if not self.num_images:
            return
        backbone = _backbone(unwrap(runner.model))
        if backbone is None or runner.val_loop is None:
            missing = 'model has no backbone' if backbone is None else 'config has no validation'
            runner.logger.info(f'Report: no attention maps, as the {missing}')
            return
        images = self._images(runner)
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

    def _images(self, runner: Any) -> Tensor:
        """Images as the model takes them, [num_images, C, H, W]."""
        loader = runner.val_loop.dataloader
        held_out = len(getattr(loader.dataset, 'queries', loader.dataset))
        first = len(loader.dataset) - held_out
        positions = torch.linspace(first, len(loader.dataset) - 1, min(self.num_images, held_out))
        batch = loader.collate_fn([loader.dataset[int(position)] for position in positions.round()])
        model: Any = unwrap(runner.model)
        return model.data_preprocessor(batch, False)['inputs']


def _gather_context(model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
    """The context in which all ranks may run the model, if its parameters are spread over them."""
    return model.gathered if isinstance(model, FullyShardedDataParallel) else None


def _backbone(model: nn.Module) -> nn.Module | None:
    """The network that makes the features: the teacher's, and what a TimmBackbone holds."""
    teacher = dict(model.named_children()).get('teacher', model)
    backbone = dict(teacher.named_children()).get('backbone')
    return backbone and dict(backbone.named_children()).get('model', backbone)
