"""Figures as a JSON file and as a table that people read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as a table of Markdown; numbers with a decimal get one."""
    cells = [[f'{cell:.1f}' if isinstance(cell, float) else str(cell) for cell in r] for r in rows]
    lines = [list(head), ['---'] * len(head), *cells]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def write_results(folder: str | Path, name: str, results: dict[str, Any], text: str) -> str:
    """Write ``name.json`` and ``name.md`` into a folder; returns the text and where it is."""
    path = Path(folder)
    (path / f'{name}.json').write_text(json.dumps(results, indent=2, allow_nan=False) + '\n')
    (path / f'{name}.md').write_text(text + '\n')
    return f'{text}\n\n{path / name}.md'
