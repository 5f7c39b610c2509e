"""Every pair of techniques on one small model: the same training, or refused by name.

``python -m tests.composition`` writes the table of ``docs/techniques/composition.md``, which
``tests/test_composition.py`` compares with what it finds.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from torch import Tensor, nn
from torch.utils.data import Dataset

from memengine.engine import Runner
from memengine.models import Classifier, SimCLR
from memengine.registry import MODELS
from memengine.testing import relative_error

PAGE = Path(__file__).parent.parent / 'docs/techniques/composition.md'
BATCH = 8
ITERATIONS, IN_HALF_PRECISION = 4, 1  # over more, a ReLU that flips is all that is seen
_COUNT = itertools.count()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(nn.functional.gelu(self.one(self.norm(x))))


@MODELS.register_module()
class ComposedBackbone(nn.Module):
    """A convolution with BatchNorm in eval mode, and repeated blocks: something for each."""

    num_features = 16

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 3, 2, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def train(self, mode: bool = True) -> ComposedBackbone:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images)).flatten(2).mean(-1)
        return self.blocks(x)


class Images(Dataset):
    """Two views of noise, or one."""

    metainfo = {'classes': ('a', 'b', 'c')}

    def __init__(self, views: int | None, dtype: torch.dtype, iterations: int) -> None:
        self.views, self.dtype, self.iterations = views, dtype, iterations

    def __len__(self) -> int:
        return BATCH * self.iterations

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        views = [
            torch.randn(1, 8, 8, generator=generator, dtype=torch.float64).to(self.dtype)
            for _ in range(self.views or 1)
        ]
        inputs = views if self.views else views[0]
        return {'inputs': inputs, 'data_samples': {'label': index % 3, 'index': index}}


@dataclass(frozen=True)
class Technique:
    """A row of the table.

    Args:
        name: In the table.
        optim: Settings of the OptimWrapper.
        cfg: Keys of the config.
        loss: Settings of SimCLR's loss.
        models: Kinds of model that it is for.
        is_setting: Whether it says what is learned (clipping, precision), so that what it is
            compared with has it too.
        is_lossy: Whether its gradient is not the plain one; a pair may be no further from plain
            training than one and a half times what the technique is alone.
    """

    name: str
    optim: Mapping[str, Any] = field(default_factory=dict)
    cfg: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ('SimCLR', 'Classifier')
    is_setting: bool = False
    is_lossy: bool = False


TECHNIQUES = [
    Technique(
        'accumulation',
        dict(type='AccumulationOptimWrapper', micro_batch_size=3),
        models=('Classifier',),
    ),
    Technique(
        'gradient cache', dict(type='GradCacheOptimWrapper', chunk_size=3), models=('SimCLR',)
    ),
    Technique('optimiser in backward', dict(type='OptimizerInBackwardOptimWrapper')),
    Technique('loss in tiles', loss=dict(tile_size=3), models=('SimCLR',)),
    Technique('activation checkpointing', cfg=dict(activation_checkpointing=['blocks'])),
    Technique('activation offload', cfg=dict(activation_offload=dict(store='disk', min_bytes=64))),
    Technique(  # not strict: beside checkpointed blocks there is nothing
        'recomputed activations', cfg=dict(recomputed_activations=dict(strict=False))
    ),
    Technique(
        'dropped activations',
        cfg=dict(dropit=dict(strategy='block_mink', block_size='row', gamma=0.5)),
        is_lossy=True,
    ),
    Technique(
        'quantised activations',
        cfg=dict(quantized_activations=dict(bits=8, min_numel=1)),
        is_lossy=True,
    ),
    Technique('compiled blocks', cfg=dict(compile_blocks=dict(backend='aot_eager'))),
    Technique('Conv-BN eval', cfg=dict(efficient_conv_bn_eval=['backbone'])),
    Technique('accumulative_counts', dict(accumulative_counts=2), is_setting=True),
    Technique('clipping', dict(clip_grad=dict(max_norm=0.1)), is_setting=True),
    Technique('bf16', dict(precision='bf16'), is_setting=True),
    Technique('fp16', dict(precision='fp16', loss_scale=4096.0), is_setting=True),
]


def train(kind: str, techniques: Iterable[Technique], iterations: int = ITERATIONS) -> Tensor:
    """All parameters after a short training with SGD, [numbers] in float64."""
    techniques = list(techniques)
    optim: dict[str, Any] = {'optimizer': {'type': 'SGD', 'lr': 0.1}}
    cfg: dict[str, Any] = {}
    loss: dict[str, Any] = {'type': 'NTXentLoss'}
    for technique in techniques:
        optim.update(technique.optim)
        cfg.update(technique.cfg)
        loss.update(technique.loss)
    half = 'precision' in optim
    torch.manual_seed(0)
    head = {'type': 'ProjectionHead', 'out_dim': 8}
    backbone = {'type': 'ComposedBackbone'}
    model: nn.Module = SimCLR(backbone, head, loss) if kind == 'SimCLR' else Classifier(backbone, 3)
    dtype = torch.float32 if half else torch.float64
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(
            model=model.to(dtype),
            work_dir=folder,
            train_dataloader={
                'dataset': Images(2 if kind == 'SimCLR' else None, dtype, iterations),
                'sampler': {'type': 'DefaultSampler', 'shuffle': False},
                'batch_size': BATCH,
                'num_workers': 0,
                'collate_fn': {'type': 'default_collate'},
            },
            train_cfg={'by_epoch': True, 'max_epochs': 1},
            optim_wrapper=optim,
            default_hooks={'checkpoint': None},
            default_scope='memengine',
            log_level='ERROR',
            randomness={'seed': 0},
            experiment_name=f'composition{next(_COUNT)}',
            cfg=Config(cfg),
        )
        runner.train()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def outcome(first: Technique, second: Technique) -> str:
    """``'exact'``, ``'lossy'``, ``'refused'``, ``'one of them'`` for two values of one setting, or
    ``'-'`` for a pair that no model is for.

    Raises:
        AssertionError: When a pair trains something else than the plain step.
    """
    if first.optim.keys() & second.optim.keys():
        return 'one of them'
    kinds = [kind for kind in first.models if kind in second.models]
    results = {_outcome(kind, first, second) for kind in kinds}
    assert len(results) <= 1, f'{first.name} and {second.name} differ between {kinds}: {results}'
    return results.pop() if results else '-'


def _outcome(kind: str, first: Technique, second: Technique) -> str:
    pair = first, second
    settings = [technique for technique in pair if technique.is_setting]
    half = any('precision' in technique.optim for technique in pair)
    iterations = IN_HALF_PRECISION if half else ITERATIONS
    try:
        trained = train(kind, pair, iterations)
    except ValueError as error:
        names = str(error)
        assert all(_is_named(technique, names) for technique in pair), (
            f'{first.name} and {second.name} are refused without naming both: {names}'
        )
        return 'refused'
    plain = train(kind, settings, iterations)
    start = _start(kind)
    moved = (plain - start).norm()
    assert moved > 1e-4, f'nothing is trained with {[s.name for s in settings]}'
    error = relative_error(trained - start, plain - start)
    lossy = [technique for technique in pair if technique.is_lossy]
    if lossy:
        alone = [train(kind, [*settings, technique], iterations) for technique in lossy]
        bound = 1.5 * sum(relative_error(x - start, plain - start) for x in alone)
        assert 0 < error <= bound < 1, f'{kind}, {first.name} and {second.name}: {error}, {bound}'
        return 'lossy'
    if not half:
        assert error <= 1e-9, f'{kind}, {first.name} and {second.name}: error {error:.1e}'
        return 'exact'
    in_float64 = [setting for setting in settings if 'precision' not in setting.optim]
    exact = train(kind, in_float64, iterations)
    ours, plains = (relative_error(x - start, exact - start) for x in (trained, plain))
    assert ours <= 1.5 * plains, f'{kind}, {first.name} and {second.name}: {ours:.1e}, {plains:.1e}'
    return 'exact'


def _start(kind: str) -> Tensor:
    torch.manual_seed(0)
    backbone = {'type': 'ComposedBackbone'}
    head = {'type': 'ProjectionHead', 'out_dim': 8}
    model: nn.Module = SimCLR(backbone, head) if kind == 'SimCLR' else Classifier(backbone, 3)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _is_named(technique: Technique, sentence: str) -> bool:
    """Whether an error says which setting it is about: its type, key or name."""
    words = [technique.name, *technique.cfg, *technique.optim, *technique.loss]
    words += [str(technique.optim.get('type', technique.name))]
    return any(word in sentence for word in words)


def table(outcomes: Mapping[tuple[str, str], str]) -> str:
    """The outcomes as Markdown, one row and one column for each technique."""
    names = [technique.name for technique in TECHNIQUES]
    signs = {'exact': '✓', 'lossy': '≈', 'refused': '✗', '-': '·', 'one of them': '○'}
    lines = ['| | ' + ' | '.join(names[1:]) + ' |', '|---|' + ':-:|' * (len(names) - 1)]
    for row, name in enumerate(names[:-1]):
        cells = [
            signs[outcomes[name, other]] if column >= row else ''
            for column, other in enumerate(names[1:])
        ]
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def pairs() -> list[tuple[Technique, Technique]]:
    """Each two techniques once."""
    return list(itertools.combinations(TECHNIQUES, 2))


def main() -> None:
    """Write the table into the page."""
    outcomes = {(a.name, b.name): outcome(a, b) for a, b in pairs()}
    begin, end = '<!-- table:begin -->\n', '\n<!-- table:end -->'
    text = PAGE.read_text()
    before, _, rest = text.partition(begin)
    PAGE.write_text(before + begin + table(outcomes) + end + rest.partition(end)[2])


if __name__ == '__main__':
    main()
