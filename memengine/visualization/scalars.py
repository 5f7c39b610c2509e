"""What a work dir's runs have logged, as one history."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Curve:
    """One quantity over training."""

    iters: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class History:
    """Quantities by name, as logged in training and in validation."""

    train: dict[str, Curve]
    val: dict[str, Curve]
    epochs: int | None
    runs: list[str]

    def total_s(self, name: str) -> float | None:
        """Seconds of ``time`` or ``data_time``: each record gives the mean of the steps before."""
        curve = self.train.get(name)
        if curve is None or len(curve.values) < max(len(c.values) for c in self.train.values()):
            return None
        starts = [0, *curve.iters]
        return sum(
            value * (end - start)
            for value, start, end in zip(curve.values, starts, curve.iters, strict=False)
        )


@dataclass(frozen=True)
class _Record:
    iter: int
    is_train: bool
    values: dict[str, float]


def read_history(work_dir: str | Path) -> History:
    """Read what all runs in a work dir have logged.

    A run that was resumed goes on from the one before: from where a later run begins, its
    records count. A run that begins anew replaces all before it.

    Raises:
        FileNotFoundError: When no run in ``work_dir`` has logged anything.
        ValueError: For a file that is no log, naming file and line.
    """
    records: list[_Record] = []
    runs: list[str] = []
    for path in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        run = _read_run(path)
        if not any(record.is_train for record in run):
            continue  # a validation alone
        starts = [min((r.iter for r in part if r.is_train), default=0) for part in (run, records)]
        begin = 0 if starts[0] <= starts[1] else min(record.iter for record in run)
        records = [record for record in records if record.iter < begin] + run
        runs = [*runs, path.parts[-3]] if begin else [path.parts[-3]]
    if not records:
        raise FileNotFoundError(
            f'{work_dir}: no run there has logged training (there is no */vis_data/scalars.json)'
        )
    train = [record for record in records if record.is_train]
    epochs = train[-1].values.get('epoch')
    return History(
        train=_curves(train),
        val=_curves([record for record in records if not record.is_train]),
        epochs=None if epochs is None else int(epochs),
        runs=runs,
    )


def _curves(records: list[_Record]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for record in records:
        for name, value in record.values.items():
            if name not in ('iter', 'epoch', 'step'):
                curve = curves.setdefault(name, Curve())
                curve.iters.append(record.iter)
                curve.values.append(value)
    return curves


def _read_run(path: Path) -> list[_Record]:
    lines = path.read_text().splitlines()
    raw: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            raw.append({_plain_name(name): value for name, value in json.loads(line).items()})
        except (json.JSONDecodeError, AttributeError) as error:
            if number == len(lines):  # the run was ended while it wrote
                break
            raise ValueError(f'{path}, line {number}: not a JSON object: {line[:80]!r}') from error
    per_epoch = _iters_per_epoch(raw)
    records, last_iter, last_epoch = [], 0, 0
    for item in raw:
        is_train = 'iter' in item
        if is_train:
            last_iter, last_epoch = int(item['iter']), int(item.get('epoch', -1))
            iteration = last_iter
        else:  # its step is the epoch, or with log_metric_by_epoch=False the iteration
            step = int(item['step'])
            by_epoch = step == last_epoch or step < last_iter
            iteration = max(step * per_epoch if by_epoch else step, last_iter)
        values = {name: float(v) for name, v in item.items() if isinstance(v, (int, float))}
        records.append(_Record(iteration, is_train, values))
    return records


def _plain_name(name: str) -> str:
    """Without the stage that ``log_with_hierarchy`` puts before it."""
    return name.removeprefix('train/').removeprefix('val/')


def _iters_per_epoch(raw: list[dict[str, Any]]) -> int:
    """Iteration i of epoch e gives i <= e * n; the last ones logged leave no choice."""
    bounds = (math.ceil(r['iter'] / r['epoch']) for r in raw if r.get('iter') and r.get('epoch'))
    return max(bounds, default=0)
