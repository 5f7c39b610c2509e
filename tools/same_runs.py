"""Short runs of a config, plain or with techniques, and whether both learn the same.

Shared by the fuzz and the reproductions that it writes.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from same_training import in_a_line, is_refusal, shaken
from torch import Tensor, nn
from torch.utils.data import Dataset

from memengine.engine import Runner
from memengine.registry import MODELS
from memengine.testing import assert_same_step, relative_error

_COUNT = itertools.count()
_PRECISIONS = {  # dtype of weights and data, error of a first update, rounding of a weight
    'float64': (torch.float64, 1e-9, 1e-15),
    'fp32': (torch.float32, 1e-4, 1e-7),
    'bf16': (torch.float32, 0.1, 2**-9),
    'fp16': (torch.float32, 0.02, 2**-12),
}
_SLICED = ('AccumulationOptimWrapper', 'GradCacheOptimWrapper')


@dataclass(frozen=True)
class Data(Dataset):
    """Noise with labels and tokens.

    Attributes:
        views: Heights and widths of the images of a sample; one is no list.
        samples: How many there are.
        batch_size: Of a step.
        tokens: Length of a text, beside the images or, without any, in their place.
    """

    views: tuple[int, ...]
    samples: int
    batch_size: int
    tokens: int = 0
    dtype: torch.dtype = torch.float64

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        images = [
            torch.randn(3, size, size, generator=generator).to(self.dtype) for size in self.views
        ]
        tokens = torch.randint(1, 19, (self.tokens,), generator=generator)
        samples = {'label': index % 3, 'index': index}
        if not images:
            return {'inputs': tokens, 'data_samples': samples}
        texts = {'tokens': tokens} if self.tokens else {}
        inputs = images[0] if len(images) == 1 else images
        return {'inputs': inputs, 'data_samples': samples | texts}


class _Record(Hook):
    """Keeps the loss of each iteration, and how far it moved each parameter."""

    priority = 'LOWEST'

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.losses: dict[str, Tensor] = {}
        self.moves: dict[str, Tensor] = {}
        self.before = self._parameters()

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        now = self._parameters()
        self.losses[f'loss {runner.iter}'] = outputs['loss'].detach().clone()
        self.moves |= {
            f'move {runner.iter} of {name}': now[name] - self.before[name] for name in now
        }
        self.before = now


@dataclass(frozen=True)
class Runs:
    """A config to be run in several ways.

    Attributes:
        model: Its config.
        data: What it is trained on, for one epoch.
        precision: ``'float64'``, ``'fp32'``, ``'bf16'`` or ``'fp16'``.
        settings: Of the optimiser's wrapper, which say what is learned.
        slices_count: Whether the model draws or normalises by a batch, so that what is learned in
            slices depends on them.
    """

    model: Mapping[str, Any]
    data: Data
    precision: str
    settings: Mapping[str, Any]
    slices_count: bool = False

    def run(self, changes: Mapping[str, Any], rounding: float = 0.0) -> _Record:
        """Train with some changes of the config, from weights that are rounded otherwise."""
        dtype = _PRECISIONS[self.precision][0]
        cfg = Config({'model': dict(self.model), 'optim_wrapper': self._wrapper()})
        cfg.merge_from_dict(dict(changes))
        torch.manual_seed(0)
        model = shaken(MODELS.build(cfg.pop('model'))).float().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + rounding * torch.randn_like(parameter))
        record = _Record(model)
        # On processors with AMX, oneDNN (in torch 2.15) leaves entries of a weight's gradient in
        # bf16 unwritten: those that meet no pixel, where a stride of 2 goes over an image of 1 x 1.
        has_onednn = self.precision in ('float64', 'fp32')
        with (
            tempfile.TemporaryDirectory() as folder,
            torch.backends.mkldnn.flags(enabled=has_onednn),
        ):
            Runner(
                model=model,
                work_dir=folder,
                train_dataloader={
                    'dataset': Data(**vars(self.data) | {'dtype': dtype}),
                    'sampler': {'type': 'DefaultSampler', 'shuffle': False},
                    'batch_size': self.data.batch_size,
                    'num_workers': 0,
                    'collate_fn': {'type': 'default_collate'},
                },
                train_cfg={'by_epoch': True, 'max_epochs': 1},
                optim_wrapper=cfg.pop('optim_wrapper'),
                default_hooks={'checkpoint': None},
                custom_hooks=[record],
                default_scope='memengine',
                log_level='ERROR',
                randomness={'seed': 0},
                experiment_name=f'run{next(_COUNT)}',
                cfg=cfg,
            ).train()
        return record

    def _wrapper(self) -> dict[str, Any]:
        optimizer = {'type': 'SGD', 'lr': 0.05, 'momentum': 0.9, 'weight_decay': 0.01}
        precision = {} if self.precision == 'float64' else {'precision': self.precision}
        scale = {'loss_scale': 1024.0} if self.precision == 'fp16' else {}
        return {'optimizer': optimizer, **precision, **scale, **self.settings}

    def first(self, record: _Record) -> tuple[Tensor, Tensor]:
        """The first loss and the first update of all parameters."""
        number = min(self.settings.get('accumulative_counts', 1), len(record.losses)) - 1
        moves = [
            m.flatten() for name, m in record.moves.items() if name.startswith(f'move {number} ')
        ]
        return record.losses['loss 0'], torch.cat(moves)

    def assert_same(self, found: _Record, want: _Record) -> None:
        """Each loss and move by its own scale; with rounding, the first ones together."""
        tolerance = _PRECISIONS[self.precision][1]
        if self.precision == 'float64':
            assert_same_step(found.losses, want.losses, tolerance)
            assert_same_step(found.moves, want.moves, tolerance)
            return
        self.assert_lossy(found, want)
        error = relative_error(self.first(found)[1], self.first(want)[1])
        assert error <= tolerance, f'the first update has an error of {error:.1e}'

    def assert_lossy(self, found: _Record, want: _Record) -> None:
        """The first loss, and that its update is one."""
        (loss, moves), (plain_loss, _) = self.first(found), self.first(want)
        error = relative_error(loss, plain_loss, 1.0)
        assert error <= _PRECISIONS[self.precision][1], f'the first loss is off by {error:.1e}'
        assert moves.isfinite().all(), 'the first update is not finite'


def outcome_of_runs(runs: Runs, changes: Mapping[str, Any], is_lossy: bool = False) -> str:
    """What becomes of a config with techniques; words as those of ``same_training.outcome``."""
    try:
        plain = runs.run({})
        moved = runs.first(plain)[1]
        if not moved.isfinite().all() or not moved.norm() > 1e-6:
            raise FloatingPointError('the plain run does not move, or not to a number')
    except Exception as error:
        return f'unfit: {in_a_line(error)}'
    try:
        found = runs.run(changes)
    except Exception as error:
        return f'{"refused" if is_refusal(error) else "wrong"}: {in_a_line(error)}'
    expected = {'same': plain}
    wrapper = changes.get('optim_wrapper', {})
    if runs.slices_count and wrapper.get('type') in _SLICED:
        expected['same in the same slices'] = runs.run({'optim_wrapper': _with_all_graphs(wrapper)})
    judge = runs.assert_lossy if is_lossy else runs.assert_same
    for good, want in expected.items():
        try:
            judge(found, want)
            return 'lossy' if is_lossy else good
        except AssertionError as error:
            reason = in_a_line(error)
    try:
        judge(runs.run({}, _PRECISIONS[runs.precision][2]), plain)
    except AssertionError as error:
        return f'unfit: rounding its weights does as much to the plain run ({in_a_line(error)})'
    return f'wrong: {reason}'


def _with_all_graphs(wrapper: Mapping[str, Any]) -> dict[str, Any]:
    """The same slices, of which none is computed twice."""
    kept = {'keep_graph': 1000} if wrapper['type'] == 'GradCacheOptimWrapper' else {}
    return {**wrapper, **kept}
