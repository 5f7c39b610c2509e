"""The report as one page: all that lies in a run's ``report``, in a file that needs no other."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from memengine.visualization.scalars import Curve, History, read_history

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
h1, h2, h3 { font-weight: 600 } h2 { border-bottom: 1px solid #ccc; margin-top: 2em }
figure { display: inline-block; margin: .5em 1em .5em 0; vertical-align: top }
figcaption { font-size: 13px } img { max-width: 100% } svg { display: block }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .15em 1em .15em 0 }
th { text-align: left; border-bottom: 1px solid #ccc } td { border-bottom: 1px solid #eee }
.bar { background: #2a6f97; display: inline-block; height: .8em; margin-right: .5em }
"""
_COLOUR = '#2a6f97'
_LARGE, _SMALL = (300, 150), (90, 36)  # pixels of a curve that tells something, and of a flat one
_PARTS = ('#1d3557', '#457b9d', '#6d597a', '#e09f3e', '#d9d9d9')
_BAR, _LEGIBLE = 640, 0.2  # pixels of a stacked bar; share of it from which on a part is named
_FLAT = 1e-3  # of the values, by which a curve has to move


def is_flat(curve: Curve) -> bool:
    """Whether a curve does not move, or is no number."""
    values = [value for value in curve.values if math.isfinite(value)]
    if len(values) < 2:
        return True
    return max(values) - min(values) <= _FLAT * max(map(abs, values))


def write_page(work_dir: str | Path) -> Path:
    """Write ``WORK_DIR/report/index.html``, a page that needs nothing else.

    It holds what the run has logged (curves, flat ones small; where time and memory went), and the
    tables and pictures in ``report`` and the folders in it, which other commands have written.
    """
    folder = Path(work_dir) / 'report'
    folder.mkdir(exist_ok=True)
    parts = [*_of_training(Path(work_dir)), *_of_files(folder)]
    name = escape(Path(work_dir).resolve().name)
    text = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f'<style>{_STYLE}</style>\n<h1>{name}</h1>\n' + '\n'.join(parts) + '\n</html>\n'
    )
    path = folder / 'index.html'
    partial = folder / '.index.html.partial'
    partial.write_text(text)
    partial.replace(path)
    return path


def _of_training(work_dir: Path) -> Iterator[str]:
    try:
        history = read_history(work_dir)
    except FileNotFoundError:
        return
    finals = {**history.val, **history.train}
    told = [name for name in finals if name not in ('time', 'data_time')]
    yield '<h2>Curves</h2>'
    moving = [name for name in told if not is_flat(finals[name])]
    for name in moving:
        yield _figure(name, finals[name], _LARGE)
    flat = [name for name in told if name not in moving]
    if flat:
        yield '<h3>What did not move</h3>'
        yield from (_figure(name, finals[name], _SMALL) for name in flat)
    yield from _of_time(history)
    yield from _of_memory(history, work_dir / 'report' / 'memory.json')


def _figure(name: str, curve: Curve, size: tuple[int, int]) -> str:
    caption = f'{escape(name)}: {curve.values[-1]:.4g}'
    return f'<figure><figcaption>{caption}</figcaption>{_svg(curve, *size)}</figure>'


def _svg(curve: Curve, width: int, height: int) -> str:
    """A polyline over the iterations; the axis's ends stand beside a large one."""
    points = [(i, v) for i, v in zip(curve.iters, curve.values, strict=True) if math.isfinite(v)]
    if not points:
        return '<svg width="1" height="1"></svg>'
    iters, values = zip(*points, strict=True)
    first, low = min(iters), min(values)
    across, up = (max(iters) - first) or 1, (max(values) - low) or 1
    line = ' '.join(
        f'{(i - first) / across * width:.1f},{(1 - (v - low) / up) * height:.1f}' for i, v in points
    )
    dot = ''
    if len(points) == 1:
        dot = f'<circle cx="0" cy="{height}" r="2" fill="{_COLOUR}"/>'
    ends = ''
    if width == _LARGE[0]:
        ends = (
            f'<text x="{width + 4}" y="8">{max(values):.4g}</text>'
            f'<text x="{width + 4}" y="{height}">{low:.4g}</text>'
            f'<text x="0" y="{height + 13}">{first}</text>'
            f'<text x="{width}" y="{height + 13}" text-anchor="end">{max(iters)}</text>'
        )
    room = (width + 60, height + 18) if ends else (width + 4, height + 4)
    return (
        f'<svg width="{room[0]}" height="{room[1]}" font-size="10" fill="#555">'
        f'<polyline points="{line}" fill="none" stroke="{_COLOUR}" stroke-width="1.5"/>'
        f'{dot}{ends}</svg>'
    )


def _of_time(history: History) -> Iterator[str]:
    total, waited = history.total_s('time'), history.total_s('data_time')
    if total is None or waited is None:
        return
    yield '<h2>Where time went</h2>'
    yield _bars([('waiting for data', waited), ('steps', max(total - waited, 0.0))], 's')


def _of_memory(history: History, held: Path) -> Iterator[str]:
    known = json.loads(held.read_text()) if held.is_file() else {}
    process = known.pop('process', 0) / 2**20
    parts = [(name, value / 2**20) for name, value in known.items() if value]
    if 'saved_mib' in history.train:
        saved = max(history.train['saved_mib'].values)
        parts.append(('saved for backward, at the peak', saved))
    of_gpu = 'reserved_mib' in history.train
    whole = max(history.train['reserved_mib'].values) if of_gpu else process
    rest = whole - sum(value for _, value in parts)
    if rest > 0:
        others = 'what the allocator keeps' if of_gpu else 'programs, data'
        parts.append((f'the rest: gradients, transients, {others}', rest))
    if parts:
        yield '<h2>Where memory went</h2>'
        yield _stack(parts)
        name = f'all of the {"GPU" if of_gpu else "process"}, at the peak'
        yield _bars([*parts, (name, whole)] if whole else parts, 'MiB')


def _stack(parts: Sequence[tuple[str, float]]) -> str:
    """Parts of a whole, side by side in one bar."""
    width, total, left = _BAR, sum(value for _, value in parts) or 1.0, 0.0
    drawn = []
    for place, (name, value) in enumerate(parts):
        share = value / total
        drawn.append(
            f'<rect x="{left:.1f}" width="{share * width:.1f}" height="28" '
            f'fill="{_PARTS[place % len(_PARTS)]}"><title>{escape(name)}</title></rect>'
        )
        if share > _LEGIBLE:
            word = escape(name.partition(':')[0].partition(',')[0])
            drawn.append(f'<text x="{left + 4:.1f}" y="42">{word}: {share:.0%}</text>')
        left += share * width
    return f'<svg width="{width}" height="46" font-size="11">{"".join(drawn)}</svg>'


def _bars(rows: Sequence[tuple[str, float]], unit: str) -> str:
    most = max(value for _, value in rows) or 1.0
    lines = []
    for name, value in rows:
        bar = f'<span class="bar" style="width: {200 * value / most:.0f}px"></span>'
        lines.append(f'<tr><td>{escape(name)}</td><td>{bar}{value:,.1f} {unit}</td></tr>')
    return f'<table>{"".join(lines)}</table>'


def _of_files(folder: Path) -> Iterator[str]:
    """Tables and pictures of the report and of the folders in it, by name."""
    pictures = [path for path in sorted(folder.glob('*.png')) if path.name != 'curves.png']
    if pictures:
        yield '<h2>Pictures</h2>'
        yield from map(_picture, pictures)
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        tables = [inner / f'{inner.name}.md', *sorted(inner.glob(f'{inner.name}_*.md'))]
        tables = [path for path in tables if path.is_file()]
        pictures = sorted(inner.glob('*.png'))
        if tables or pictures:
            yield f'<h2>{escape(inner.name)}</h2>'
        yield from (_table(path.read_text()) for path in tables)
        yield from map(_picture, pictures)


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = escape(path.stem.replace('_', ' '))
    image = f'<img src="data:image/png;base64,{data}" alt="{name}" width="720">'
    return f'<figure><figcaption>{name}</figcaption>{image}</figure>'


def _table(text: str) -> str:
    """A table of Markdown, as ``write_results`` makes it."""
    lines = [line.strip('| ').split(' | ') for line in text.splitlines() if line.startswith('|')]
    head, _, *rows = lines

    def row(cells: Sequence[Any], tag: str) -> str:
        return f'<tr>{"".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)}</tr>'

    return f'<table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table>'
