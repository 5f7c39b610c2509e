"""The names that a config file uses itself, which are no settings though they look like ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ['used_names']


def used_names(file: Path) -> set[str]:
    """Names that a Python config or one of its bases reads somewhere.

    Args:
        file: The config; one that is not there or not in Python uses none.
    """
    names: set[str] = set()
    for path in _with_bases(file, set()):
        text = path.read_text(encoding='utf-8')
        names |= set(re.findall(r'_base_\.(\w+)', text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(node.id)
    return names


def _with_bases(file: Path, seen: set[Path]) -> Iterator[Path]:
    """A config and all that it builds on, as far as they are files beside it."""
    file = file.resolve()
    if file in seen or file.suffix != '.py' or not file.is_file():
        return
    seen.add(file)
    yield file
    for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Assign) and any(_is_base(target) for target in node.targets):
            for constant in ast.walk(node.value):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield from _with_bases(file.parent / constant.value, seen)
        elif isinstance(node, ast.ImportFrom) and node.level > 0 and node.module:
            folder = file.parent.joinpath(*['..'] * (node.level - 1))
            yield from _with_bases(folder / f'{node.module.replace(".", "/")}.py', seen)


def _is_base(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == '_base_'
