"""``memengine memory``: the course of a step's memory, its peak explained, techniques beside it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger

from memengine.engine.cli.values import parse_value
from memengine.engine.config.check import check_config
from memengine.engine.config.file import merge_options
from memengine.engine.config.planning import Planner
from memengine.engine.config.step_of_config import first_batch, step_of
from memengine.memory import (
    LiveTensor,
    Prediction,
    Timeline,
    UnpredictableError,
    predict,
    timeline,
    write_snapshot,
)
from memengine.technique import Technique, techniques

__all__ = ['report_memory']

_MIB = 2**20
_MOST_TENSORS = 12
_SLICES = 4
_LONGEST = 100  # of a reason on the console; the page has all of it
_MEASURE = 'memengine measure CONFIG --cfg-options'
_NOTHING = 'nothing that is predicted changes'


@dataclass(frozen=True)
class Row:
    """A technique beside the step as it is: what it takes, or why that is not said."""

    technique: Technique[Any]
    options: dict[str, Any]
    predicted: Prediction | None = None
    why_not: str = ''


def report_memory(cfg: Config, as_json: bool = False) -> str:
    """Where the memory of a config's step goes, and what each technique would change.

    Args:
        cfg: A checked config of training. ``report/memory`` of its work dir gets the picture and
            the tables, ``report/index.html`` shows them; on a GPU there is torch's snapshot of a
            real step, too.
        as_json: Give figures in bytes.

    Returns:
        Lines for the console.
    """
    from memengine.visualization.memory import draw_memory
    from memengine.visualization.page import write_page

    MMLogger.get_current_instance().setLevel('ERROR')  # a prediction says what a run says once
    batch = first_batch(cfg)
    course = timeline(step_of(cfg, batch))
    rows = list(_rows(cfg, batch, course.predicted))
    folder = Path(cfg.work_dir) / 'report' / 'memory'
    draw_memory(course.live, course.peak, _said(course.last), folder / 'over_a_step.png')
    groups = list(_groups(course.tensors))
    (folder / 'memory.md').write_text(_markdown(_TECHNIQUES, _cells(rows, course.predicted)))
    (folder / 'memory_peak.md').write_text(_markdown(_TENSORS, groups))
    written = [str(write_page(cfg.work_dir))]
    if get_device() == 'cuda':
        written.append(str(write_snapshot(step_of(cfg, batch), folder / 'snapshot.pickle')))
    if as_json:
        return json.dumps(_figures(course, rows))
    return '\n'.join(
        [
            f'{_mib(course.predicted.peak_bytes)} MiB at the peak of a training step, predicted '
            'for one process on a CPU',
            f'reached in {_said(course.last)}',
            f'    {course.last.line}: {course.last.code}',
            '',
            'the largest of the peak:',
            *_aligned(_TENSORS, groups),
            '',
            'each technique by itself:',
            *_aligned(_TECHNIQUES, _cells(rows, course.predicted)),
            '',
            *written,
        ]
    )


# ------------------------------------------------------------------ techniques


def _rows(cfg: Config, batch: Any, plain: Prediction) -> Iterator[Row]:
    planner = Planner(cfg)
    for technique in techniques().values():
        options, why_not = _options(technique, planner)
        if why_not:
            yield Row(technique, {}, why_not=why_not)
            continue
        changed = copy.deepcopy(cfg)
        try:
            merge_options(changed, options)
            check_config(changed)
            predicted = predict(step_of(changed, batch))
        except UnpredictableError:
            yield Row(technique, options, why_not=f'not predicted: {_MEASURE} {_line(options)}')
        except (ValueError, ImportError) as error:
            yield Row(technique, options, why_not=str(error).splitlines()[0])
        else:
            is_same = predicted == plain
            yield Row(technique, options, predicted, _NOTHING if is_same else '')


def _options(technique: Technique[Any], planner: Planner) -> tuple[dict[str, Any], str]:
    """What switches a technique on in a config, or why that is not tried."""
    if technique.needs_ranks:
        return {}, 'it is for several processes'
    if technique.apply and planner.cfg.get(technique.key):
        return {}, 'it is on'
    if technique.key not in ('accumulation', 'grad_cache'):
        words = (word.partition('=') for word in technique.typed.split())
        return {key: parse_value(value) for key, _, value in words}, ''
    slices = next((knob.levels for knob in planner.knobs if knob.name == 'slices'), ())
    if not slices:
        return {}, planner.left_out.get('slices', 'a batch of one cannot be cut')
    number = next((level for level in slices if level >= _SLICES), slices[-1])
    options = planner.options({'slices': number})
    is_its = technique.name.endswith(f'={options["optim_wrapper.type"]}')
    return (options, '') if is_its else ({}, f'the loss is not {technique.loss}')


_TECHNIQUES = ('technique', 'gradients', 'MiB', 'of it', 'FLOPs', 'bytes moved', 'by')


def _cells(rows: Iterable[Row], plain: Prediction) -> Iterator[tuple[str, ...]]:
    yield ('as it is', '', _mib(plain.peak_bytes), '', '', '', '')
    known = [row for row in rows if row.predicted is not None]
    for row in sorted(known, key=lambda row: row.predicted.peak_bytes):  # type: ignore[union-attr]
        cost = row.predicted
        assert cost is not None
        yield (
            row.technique.key,
            row.technique.exactness,
            _mib(cost.peak_bytes),
            f'{cost.peak_bytes / plain.peak_bytes:.0%}',
            f'{cost.flops / plain.flops - 1:+.1%}',
            f'{cost.moved_bytes / plain.moved_bytes - 1:+.1%}',
            row.why_not or _line(row.options),
        )
    for row in rows:
        if row.predicted is None:
            yield row.technique.key, row.technique.exactness, '', '', '', '', row.why_not


# ------------------------------------------------------------------ the peak

_TENSORS = ('MiB', 'what for', 'tensors', 'module', 'line', '')


def _groups(tensors: Sequence[LiveTensor]) -> Iterator[tuple[str, ...]]:
    """What is there at the peak, alike ones of a line together, the largest first."""

    def kind(one: LiveTensor) -> tuple[Any, ...]:
        return one.category, one.line, one.in_backward, one.shape

    alike = [list(some) for _, some in groupby(sorted(tensors, key=kind), kind)]
    alike.sort(key=lambda some: sum(one.nbytes for one in some), reverse=True)
    for some in alike[:_MOST_TENSORS]:
        first = some[0]
        modules = list(dict.fromkeys(one.module for one in some))
        more = f' and {len(modules) - 1} more' if len(modules) > 1 else ''
        shape = '×'.join(map(str, first.shape))
        yield (
            _mib(sum(one.nbytes for one in some)),
            first.category,
            f'{len(some)} of {shape or "no shape"}',
            f'{modules[0]}{more}',
            f'{first.line}{", its backward" if first.in_backward else ""}',
            first.code,
        )


def _said(one: LiveTensor) -> str:
    passed = 'the backward of ' if one.in_backward else ''
    return f'{passed}{one.module or "no module"}: {one.op}'


# ------------------------------------------------------------------ text


def _figures(course: Timeline, rows: Iterable[Row]) -> dict[str, Any]:
    return {
        'predicted': asdict(course.predicted),
        'last': asdict(course.last),
        'tensors': [asdict(one) for one in course.tensors],
        'techniques': {
            row.technique.key: {
                'options': row.options,
                'predicted': row.predicted and asdict(row.predicted),
                'why_not': row.why_not,
            }
            for row in rows
        },
    }


def _line(options: Mapping[str, Any]) -> str:
    return ' '.join(f'{key}={value}' for key, value in options.items())


def _mib(nbytes: int) -> str:
    return f'{nbytes / _MIB:.1f}'


def _aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    cells = [[shorten(cell, _LONGEST, placeholder=' …') for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(cell.replace("|", "¦") for cell in line)} |' for line in lines)
