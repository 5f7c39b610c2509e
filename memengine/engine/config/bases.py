"""The files that a config is made of, and the names that they use themselves."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import memengine

__all__ = ['config_files', 'find_config', 'used_names']


def find_config(name: str | Path) -> Path:
    """The file that a config's name stands for.

    Args:
        name: A path; or the name of a config that comes along, as ``dino_vit`` or
            ``dino/dino_vit-small-p16_8xb64-100e_imagenet``. A path that exists goes first.

    Returns:
        The path; ``name`` itself where there is no such file.
    """
    package = Path(memengine.__file__).parent
    for folder in (package / 'configs', package.parent / 'configs'):  # installed; in a checkout
        file = folder / f'{name}.py'
        if not os.path.exists(name) and file.is_file():
            return file
    return Path(name)


def used_names(file: Path) -> set[str]:
    """Names that a Python config or one of its bases reads somewhere, which are no settings.

    Args:
        file: The config; one that is not there or not in Python uses none.
    """
    names: set[str] = set()
    for path, _ in config_files(file):
        if path.suffix == '.py' and path.is_file():
            text = path.read_text(encoding='utf-8')
            names |= set(re.findall(r'_base_\.(\w+)', text))
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
            names |= {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
    return names


def config_files(
    file: Path, including: tuple[Path, ...] = ()
) -> Iterator[tuple[Path, Path | None]]:
    """A config and all that it builds on, each with the file that names it.

    Args:
        file: The config.
        including: The files that lead to it, the outermost first.

    Raises:
        SyntaxError: With the file's name.
    """
    file = file.resolve()
    yield file, (including[-1] if including else None)
    if file.suffix != '.py' or not file.is_file() or file in including:
        return
    for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'), str(file))):
        if isinstance(node, ast.Assign) and '_base_' in map(ast.unparse, node.targets):
            for constant in ast.walk(node.value):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield from config_files(file.parent / constant.value, (*including, file))
        elif isinstance(node, ast.ImportFrom) and node.level > 0 and node.module:
            module = Path(*['..'] * (node.level - 1), *node.module.split('.'))
            yield from config_files(file.parent / f'{module}.py', (*including, file))
