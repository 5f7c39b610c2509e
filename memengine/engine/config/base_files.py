"""The files that a config is made of, the names that they use, and what their text tells."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import memengine
from memengine.engine.config.error import ConfigError
from memengine.suggest import similar

UNKNOWN = object()
"""A value that the text of a config does not tell."""
SUFFIXES = ('.py', '.yaml', '.yml', '.json')
SHIPPED = 'memengine::'
"""What a base's name begins with if it is a config that comes along."""


def find_config(name: str | Path) -> Path:
    """The file that a config's name stands for.

    Args:
        name: A path; or the name of a config that comes along, as ``dino_vit`` or
            ``dino/dino_vit-small-p16_8xb64-100e_imagenet``. A path that exists goes first.

    Returns:
        The path; ``name`` itself where there is no such file.
    """
    file = _shipped_configs() / f'{name}.py'
    return Path(name) if os.path.exists(name) or not file.is_file() else file


def existing_config(name: str | Path) -> Path:
    """The file that a config's name stands for.

    Raises:
        ConfigError: When there is none, or it is no config.
    """
    path = find_config(name)
    if not path.exists():
        raise ConfigError(f'there is no config file {path}{similar_files(path)}')
    if path.is_dir():
        inside = sorted(map(str, path.rglob('*.py')))[:3]
        such_as = f', such as {" or ".join(inside)}' if inside else ''
        raise ConfigError(f'{path} is a folder; give a config file{such_as}')
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f'{path} is no config file: its name must end in .py, .yaml, .yml or .json'
        )
    return path


def similar_files(path: str | Path, patterns: tuple[str, ...] = ('*.py',)) -> str:
    """A clause that names existing files like ``path``: beside it, below ``configs/``, our own."""
    path = Path(path)
    folders = [(path.parent, 'glob'), (Path('configs'), 'rglob')]
    found = {
        file.name: str(file)
        for folder, search in reversed(folders)
        if folder.is_dir()
        for pattern in patterns
        for file in getattr(folder, search)(pattern)
    }
    stems = {Path(name).stem: file for name, file in found.items()}
    if path.parent == Path() and not path.suffix:  # as the configs are called that come along
        stems = {file.stem: file.stem for file in _shipped_configs().glob('*.py')} | stems
    like = similar(path.stem, stems)
    return f': did you mean {" or ".join(stems[stem] for stem in like)}?' if like else ''


def relative_path(path: str | Path) -> str:
    """A path as messages say it: from here on, where it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith('..') else relative


def base_file(name: str, by: Path) -> Path:
    """The file that a base's name stands for.

    Args:
        name: ``memengine::dino_vit.py``, a config that comes along; else a path.
        by: The config that names it, beside which paths begin.
    """
    if name.startswith(SHIPPED):
        return _shipped_configs() / name.removeprefix(SHIPPED)
    return by.parent / name


def _shipped_configs() -> Path:
    """The folder of the configs that come along."""
    package = Path(memengine.__file__).parent
    installed = package / 'configs'
    return installed if installed.is_dir() else package.parent / 'configs'


def used_names(file: Path) -> set[str]:
    """Names that a Python config or one of its bases reads somewhere, which are no settings.

    Args:
        file: The config; one that is not there uses none.
    """
    names: set[str] = set()
    for path, _ in config_files(file):
        if path.is_file():
            names |= set(re.findall(r'_base_\.(\w+)', path.read_text(encoding='utf-8')))
            nodes = [node for node in ast.walk(_parsed(path)) if isinstance(node, ast.Name)]
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
        ValueError: When YAML or JSON cannot be read.
    """
    file = file.resolve()
    yield file, (including[-1] if including else None)
    if not file.is_file() or file in including:
        return
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Assign) and '_base_' in map(ast.unparse, node.targets):
            for constant in ast.walk(node.value):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield from config_files(base_file(constant.value, file), (*including, file))
        elif isinstance(node, ast.ImportFrom) and node.level > 0 and node.module:
            module = Path(*['..'] * (node.level - 1), *node.module.split('.'))
            yield from config_files(file.parent / f'{module}.py', (*including, file))


def assigned(file: Path) -> Iterator[tuple[str, bool]]:
    """Names that a config's top level assigns and keeps, and whether to a plain value."""
    body = _parsed(file).body
    deleted = [
        ast.unparse(it) for node in body if isinstance(node, ast.Delete) for it in node.targets
    ]
    for node in body:
        if isinstance(node, ast.Assign):
            value = node.value
            plain = isinstance(value, (ast.Constant, ast.Dict, ast.List, ast.Tuple)) or (
                isinstance(value, ast.Call) and ast.unparse(value.func) == 'dict'
            )
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id not in ('_base_', *deleted):
                    yield target.id, plain


def _parsed(file: Path) -> ast.Module:
    """A config as Python; YAML and JSON as the assignments that say the same."""
    text = file.read_text(encoding='utf-8')
    if file.suffix == '.py':
        return ast.parse(text, str(file))
    import yaml  # which reads JSON, too

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(' '.join(str(error).split())) from error
    pairs = entries.items() if isinstance(entries, dict) else ()
    return ast.parse('\n'.join(f'{key} = {value!r}' for key, value in pairs), str(file))


def base_fault(file: Path) -> str | None:
    """Why a config cannot build on what its ``_base_`` names, though that is there, if so."""
    for path, by in config_files(file):
        if by is not None and by in (below for below, _ in config_files(path)):
            return (
                f'{relative_path(by)}: its base config {relative_path(path)} builds on it in turn'
            )
        for node in _parsed(path).body if path.is_file() else ():
            match node:
                case ast.Assign(targets=[ast.Name(id='_base_')], value=value):
                    named = _value(value, {})
                    each = named if isinstance(named, (list, tuple)) else [named]
                    if not all(isinstance(base, str) or base is UNKNOWN for base in each):
                        return (
                            f'{relative_path(path)}: _base_ must be a path or paths, got {named!r}'
                        )
    return None


def values_in_text(file: Path, including: tuple[Path, ...] = ()) -> dict[str, Any] | None:
    """The settings of a config and its bases, as far as their text tells; nothing is run.

    Args:
        file: The config.
        including: The files that lead to it, the outermost first.

    Returns:
        Values by name, :data:`UNKNOWN` where an expression is more than plain values, ``dict(...)``
        and names of the same file; None when a file does more than assign, or builds on itself.
    """
    file = file.resolve()
    if file in including:
        return None
    own: dict[str, Any] = {}
    for statement in _parsed(file).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                own[name] = _value(value, own)
            case ast.Delete(targets=targets) if all(isinstance(it, ast.Name) for it in targets):
                for target in targets:
                    own.pop(ast.unparse(target), None)
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                return None
    named = own.pop('_base_', [])
    named = [named] if isinstance(named, str) else named
    values: dict[str, Any] = {}
    for base in named if isinstance(named, (list, tuple)) else [UNKNOWN]:
        below = base_file(base, file) if isinstance(base, str) else None
        is_there = below is not None and below.is_file()
        read = values_in_text(below, (*including, file)) if below is not None and is_there else None
        if read is None:
            return None
        values |= read
    return merged(values, own)


def values_in_dump(text: str) -> dict[str, Any]:
    """The settings of a config that was written out (``Config.pretty_text``); nothing is run.

    Args:
        text: The config; a checkpoint holds that of its run.

    Returns:
        Values by name, :data:`UNKNOWN` where one is no plain value; classes by their dotted names.
        A setting that is no Python is left out.
    """
    values: dict[str, Any] = {}
    for setting in re.split(r'^(?=\w+\s*=)', text, flags=re.MULTILINE):
        with suppress(SyntaxError, ValueError, RecursionError):
            for node in ast.parse(re.sub(r"<class ('[\w.]+')>", r'\1', setting)).body:
                if isinstance(node, ast.Assign):
                    values[ast.unparse(node.targets[0])] = _value(node.value, {})
    return values


def merged(base: Any, changes: Any) -> Any:
    """A value of a config with what stands for it further down, as MMEngine merges them."""
    if isinstance(base, list) and isinstance(changes, Mapping) and changes:
        if not all(str(key).isdigit() and int(key) < len(base) for key in changes):
            return UNKNOWN
        return [merged(old, changes.get(str(i), old)) for i, old in enumerate(base)]
    if not isinstance(changes, dict):
        return changes
    if not isinstance(base, dict) or changes.get('_delete_'):
        return {key: value for key, value in changes.items() if key != '_delete_'}
    return base | {key: merged(base.get(key), value) for key, value in changes.items()}


def misplaced(values: Any, path: str, value: Any) -> str | None:
    """Why an option cannot be set for what stands at its path, or on the way there, if so.

    Args:
        values: The config.
        path: The option's.
        value: The option's.
    """
    keys = path.split('.')
    node = values
    for depth, key in enumerate(keys):
        before = '.'.join(keys[:depth])
        if hasattr(node, 'keys'):
            if key not in node:
                return None  # a new entry, which check_config judges
            node = node[key]
        elif isinstance(node, list):
            if not key.isdigit():
                return f'{path}: {before} is a list; name an entry by its number, as {before}.0'
            if int(key) >= len(node):
                there = f'its entries are 0 to {len(node) - 1}' if node else 'it is empty'
                return f'{path}: {before} has no entry {key}; {there}'
            node = node[int(key)]
        elif node is UNKNOWN:
            return None
        else:
            return f'{path}: {before} is {node!r}, which has no entries; set {before} as a whole'
    if node is UNKNOWN:
        return None
    if isinstance(value, Mapping) and not isinstance(node, (Mapping, type(None))):
        advice = 'give it whole, or set one by its number' if isinstance(node, list) else ''
        return f'{path}: is {node!r}, got {dict(value)!r}; {advice or "give it a value like this"}'
    if (
        isinstance(node, Mapping)
        and node
        and isinstance(value, (str, int, float))
        and not isinstance(value, bool)
    ):
        return f'{path}: is a dict; set its entries one by one, as {path}.{next(iter(node))}=...'
    return None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression stands for."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names.get(name, UNKNOWN)
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            values: list[Any] = []
            for entry in entries:
                several = isinstance(entry, ast.Starred)
                value = _value(entry.value if isinstance(entry, ast.Starred) else entry, names)
                if several and not isinstance(value, (list, tuple)):
                    return UNKNOWN
                values += value if several else [value]
            return tuple(values) if isinstance(node, ast.Tuple) else values
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Call(func=ast.Name(id='dict'), args=[ast.Dict() as entries], keywords=[]):
            return _value(entries, names)
        case ast.Call(func=ast.Name(id='dict'), args=[], keywords=pairs):
            if all(pair.arg for pair in pairs):
                return {str(pair.arg): _value(pair.value, names) for pair in pairs}
        case ast.Dict(keys=keys, values=entries):
            if all(isinstance(key, ast.Constant) for key in keys):
                return {
                    ast.literal_eval(key): _value(value, names)
                    for key, value in zip(keys, entries, strict=True)
                    if key is not None
                }
    return UNKNOWN
