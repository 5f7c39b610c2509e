"""Every pair of techniques on one small model: the same training, or refused by name.

``python -m tests.composition`` writes the table of ``docs/techniques/composition.md``, which
``tests/test_composition.py`` compares with what it finds.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from torch import Tensor, nn
from torch.utils.data import Dataset

from memengine.engine import Runner
from memengine.models import Classifier, SimCLR
from memengine.registry import MODELS
from memengine.technique import Technique, in_order, settings_of, techniques
from memengine.testing import relative_error

PAGE = Path(__file__).parent.parent / 'docs/techniques/composition.md'
BATCH = 8
ITERATIONS, IN_HALF_PRECISION = 4, 1  # over more, a ReLU that flips is all that is seen
_COUNT = itertools.count()
# A gradient that draws errs by another amount in each run: the logarithm of a run's error has a
# standard deviation of 0.03 to 0.28 (8 bits, 12 seeds, each kind of model, 1 and 4 iterations).
SPREAD, DEVIATIONS = 0.3, 6
DRAWS_ALONE, DRAWS = 8, 4


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


@dataclass(frozen=True, eq=False)
class Row:
    """A row of the table.

    Args:
        name: In the table.
        cfg: What it sets in a config: ``optim_wrapper``, ``model.loss``, keys of techniques.
        models: Kinds of model that it is for.
        words: What an error may call it.
        is_setting: Whether it says what is learned (clipping, precision), so that what it is
            compared with has it too.
        is_lossy: Whether its gradient is not the plain one; a pair may be no further from plain
            training than one and a half times what the technique is alone. Where that draws, both
            are root mean squares over several seeds, and the bound is wider by six of the standard
            deviations that their ratio then has.
    """

    name: str
    cfg: Mapping[str, Any]
    models: tuple[str, ...] = ('SimCLR', 'Classifier')
    words: tuple[str, ...] = ()
    is_setting: bool = False
    is_lossy: bool = False


MODELS_FOR = {'any': ('SimCLR', 'Classifier'), 'coupled': ('SimCLR',), 'additive': ('Classifier',)}


def row_of(technique: Technique) -> Row:
    """A technique with the settings that its description gives for small models."""
    return Row(
        technique.title,
        example_of(technique),
        MODELS_FOR[technique.loss],
        (technique.name,),
        is_lossy=technique.exactness == 'lossy',
    )


def example_of(technique: Technique) -> dict[str, Any]:
    """What a config with the description's example says."""
    known = settings_of(technique.settings)
    values = {
        name: value
        for name, value in vars(technique.example).items()
        if known[name].is_required or value != known[name].field.default
    }
    if technique.apply:
        return {technique.key: values}
    *path, last = technique.name.partition('=')[0].split('.')
    if last == 'type':
        values['type'] = technique.name.partition('=')[2]
    for key in reversed(path):
        values = {key: values}
    return values


def rows() -> list[Row]:
    """Every technique that one process can show, and settings that they have to go with."""
    described = techniques().values()
    applied = list(in_order(described))
    others = sorted((t for t in described if not t.apply), key=lambda t: t.key)
    return [row_of(t) for t in (*others, *applied) if t.example is not None] + [
        Row(
            'accumulative_counts',
            optim(accumulative_counts=2, accumulate_coupled=True),
            is_setting=True,
        ),
        Row('clipping', optim(clip_grad=dict(max_norm=0.1)), words=('clip_grad',), is_setting=True),
        Row('bf16', optim(precision='bf16'), is_setting=True),
        Row('fp16', optim(precision='fp16', loss_scale=4096.0), is_setting=True),
    ]


def optim(**settings: Any) -> dict[str, Any]:
    return {'optim_wrapper': settings}


def train(
    kind: str,
    rows: Iterable[Row],
    iterations: int = ITERATIONS,
    hooks: Sequence[Any] = (),
    seed: int = 0,
) -> Tensor:
    """All parameters after a short training with SGD, [numbers] in float64.

    The seed is that of the run, so what techniques draw follows it; weights and data do not.
    """
    cfg = Config(optim(optimizer={'type': 'SGD', 'lr': 0.1}))
    cfg.model = {'loss': {'type': 'NTXentLoss'}}
    for row in rows:
        cfg.merge_from_dict(dict(row.cfg))
    half = 'precision' in cfg.optim_wrapper
    torch.manual_seed(0)
    head = {'type': 'ProjectionHead', 'out_dim': 8}
    backbone = {'type': 'ComposedBackbone'}
    loss = cfg.pop('model').loss
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
            optim_wrapper=cfg.pop('optim_wrapper'),
            default_hooks={'checkpoint': None},
            custom_hooks=list(hooks),
            default_scope='memengine',
            log_level='ERROR',
            randomness={'seed': seed},
            experiment_name=f'composition{next(_COUNT)}',
            cfg=cfg,
        )
        runner.train()
    return torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])


def outcome(first: Row, second: Row) -> str:
    """``'exact'``, ``'lossy'``, ``'refused'``, ``'one of them'`` for two values of one setting, or
    ``'-'`` for a pair that no model is for.

    Raises:
        AssertionError: When a pair trains something else than the plain step.
    """
    if leaves(first.cfg) & leaves(second.cfg):
        return 'one of them'
    kinds = [kind for kind in first.models if kind in second.models]
    results = {_outcome(kind, first, second) for kind in kinds}
    assert len(results) <= 1, f'{first.name} and {second.name} differ between {kinds}: {results}'
    return results.pop() if results else '-'


def leaves(cfg: Mapping[str, Any], above: str = '') -> set[str]:
    """The dotted paths of what a config sets."""
    found = set()
    for key, value in cfg.items():
        path = f'{above}{key}'
        found |= leaves(value, f'{path}.') if isinstance(value, Mapping) else {path}
    return found


def _outcome(kind: str, first: Row, second: Row) -> str:
    pair = first, second
    settings = tuple(row for row in pair if row.is_setting)
    half = any(map(_is_precision, pair))
    iterations = IN_HALF_PRECISION if half else ITERATIONS
    try:
        trained = train(kind, pair, iterations)
    except ValueError as error:
        names = str(error)
        assert all(_is_named(row, names) for row in pair), (
            f'{first.name} and {second.name} are refused without naming both: {names}'
        )
        return 'refused'
    plain = _plain(kind, settings, iterations)
    start = _start(kind)
    moved = (plain - start).norm()
    assert moved > 1e-4, f'nothing is trained with {[s.name for s in settings]}'
    error = relative_error(trained - start, plain - start)
    lossy = [row for row in pair if row.is_lossy]
    if lossy:
        alone = [_errors_alone(kind, (*settings, row), iterations) for row in lossy]
        later = range(1, DRAWS if any(map(_draws, alone)) else 1)
        runs = [train(kind, pair, iterations, seed=seed) - start for seed in later]
        error = _rms([error, *(relative_error(run, plain - start) for run in runs)])
        bound = sum(margin(_draws(errors)) * _rms(errors) for errors in alone)
        assert 0 < error <= bound < 1, f'{kind}, {first.name} and {second.name}: {error}, {bound}'
        return 'lossy'
    if not half:
        assert error <= 1e-9, f'{kind}, {first.name} and {second.name}: error {error:.1e}'
        return 'exact'
    in_float64 = tuple(row for row in settings if not _is_precision(row))
    exact = _plain(kind, in_float64, iterations)
    ours, plains = (relative_error(x - start, exact - start) for x in (trained, plain))
    assert ours <= 1.5 * plains, f'{kind}, {first.name} and {second.name}: {ours:.1e}, {plains:.1e}'
    return 'exact'


@functools.cache
def _plain(kind: str, settings: tuple[Row, ...], iterations: int) -> Tensor:
    return train(kind, settings, iterations)


@functools.cache
def _errors_alone(kind: str, rows: tuple[Row, ...], iterations: int) -> list[float]:
    """How far a lossy technique, the last of the rows, is from plain training with each seed.

    Two that are equal tell that it draws nothing.
    """
    start, plain = _start(kind), _plain(kind, rows[:-1], iterations)
    errors: list[float] = []
    for seed in range(DRAWS_ALONE):
        trained = train(kind, rows, iterations, seed=seed)
        errors.append(relative_error(trained - start, plain - start))
        if len(errors) == 2 and errors[0] == errors[1]:
            break
    return errors


def _draws(errors: Sequence[float]) -> bool:
    return len(set(errors)) > 1


def _rms(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def margin(draws: bool) -> float:
    """What a pair's error may be in terms of the error alone: 1.5, and 4.5 where it draws."""
    deviation = SPREAD * math.sqrt(1 / DRAWS + 1 / DRAWS_ALONE) if draws else 0.0
    return 1.5 * math.exp(DEVIATIONS * deviation)


@functools.cache
def _start(kind: str) -> Tensor:
    torch.manual_seed(0)
    backbone = {'type': 'ComposedBackbone'}
    head = {'type': 'ProjectionHead', 'out_dim': 8}
    model: nn.Module = SimCLR(backbone, head) if kind == 'SimCLR' else Classifier(backbone, 3)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _is_precision(row: Row) -> bool:
    return 'optim_wrapper.precision' in leaves(row.cfg)


def _is_named(row: Row, sentence: str) -> bool:
    """Whether an error says which setting it is about: its type, key or name."""
    return any(word in sentence for word in (row.name, *row.words))


SIGNS = {'exact': '✓', 'lossy': '≈', 'refused': '✗', '-': '·', 'one of them': '○'}


def table(outcomes: Mapping[tuple[str, str], str]) -> str:
    """The outcomes as Markdown, one row and one column for each technique."""
    names = [row.name for row in rows()]
    lines = ['| | ' + ' | '.join(names[1:]) + ' |', '|---|' + ':-:|' * (len(names) - 1)]
    for row, name in enumerate(names[:-1]):
        cells = [
            SIGNS[outcomes[name, other]] if column >= row else ''
            for column, other in enumerate(names[1:])
        ]
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def pairs() -> list[tuple[Row, Row]]:
    """Each two rows once."""
    return list(itertools.combinations(rows(), 2))


def main() -> None:
    """Write the table into the page."""
    outcomes = {(a.name, b.name): outcome(a, b) for a, b in pairs()}
    begin, end = '<!-- table:begin -->\n', '\n<!-- table:end -->'
    text = PAGE.read_text()
    before, _, rest = text.partition(begin)
    PAGE.write_text(before + begin + table(outcomes) + end + rest.partition(end)[2])


if __name__ == '__main__':
    main()
