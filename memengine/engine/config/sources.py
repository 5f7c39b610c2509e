"""What types a config may name and which arguments they take, by sources; nothing is imported.

Importing torch and what is built on it takes seconds of processor time, reading a few files none.
What a source does not tell for sure is unknown here.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ['arguments_in_source', 'is_a_word', 'registered_types', 'settings_in_source']

# Where types come from that a config names without their module.
_SEARCHED_PACKAGES = (
    'memengine',
    'mmengine',
    'mmcv/transforms',
    'torch/optim',
    'torch/utils/data',
    'torchao/optim',
    'bitsandbytes/optim',
)
_TITLES = r"^(\w+) = (?:Registry|_child)\(\s*'([\w ]+)'"  # MODELS = Registry('model', ...)
_REGISTERED = r'^@(\w+)\.register_module\(\)(?:\n@.*)*\nclass (\w+)'


@functools.cache
def _texts() -> tuple[str, ...]:
    """All files of the places that are there."""
    folders = []
    for place in _SEARCHED_PACKAGES:
        package, _, below = place.partition('/')
        spec = importlib.util.find_spec(package)
        folders += [Path(root) / below for root in (spec and spec.submodule_search_locations) or ()]
    files = sorted(file for folder in folders for file in folder.rglob('*.py'))
    return tuple(file.read_text(encoding='utf-8') for file in files)


def is_a_word(name: str) -> bool:
    """Whether some code has it as a name or in quotes, so that it may mean something there."""
    pattern = re.compile(rf'[\'"]{name}[\'"]|\b{name}(?:\(| ?[:=])')
    return any(name in text and pattern.search(text) for text in _texts())


@functools.cache
def registered_types() -> dict[str, str]:
    """The classes that a decorator registers, and the title of their registry."""
    titles = {key: title for text in _texts() for key, title in re.findall(_TITLES, text, re.M)}
    pairs = [pair for text in _texts() for pair in re.findall(_REGISTERED, text, re.M)]
    return {name: titles[key].replace('_', ' ') for key, name in pairs if key in titles}


def settings_in_source(technique: str) -> Collection[str] | None:
    """The settings of a technique by its key; None if they are unknown."""
    return arguments_in_source(_settings().get(technique, ''))


@functools.cache
def _settings() -> dict[str, str]:
    """The class of each technique's settings, by its key."""
    found = {}
    for text in _texts():
        if ' = Technique(' in text:
            constants = dict(re.findall(r"^(\w+) = ('\w+')", text, re.M))
            for key, settings in re.findall(
                r'^    key=(.+),(?s:.*?)^    settings=(\w+)', text, re.M
            ):
                found[constants.get(key, key).strip("'")] = settings
    return found


@functools.cache
def arguments_in_source(name: str) -> Collection[str] | None:
    """The arguments that all classes of a name take by keyword; None if they are unknown."""
    classes = list(_classes(name))
    found = [_arguments_of(node) for node in classes]
    if not found or any(arguments is None for arguments in found):
        return None
    return frozenset(key for arguments in found for key in arguments or ())


def _classes(name: str) -> Iterator[ast.ClassDef]:
    for text in _texts():
        if f'class {name}' in text:
            body = ast.parse(text).body
            yield from (it for it in body if isinstance(it, ast.ClassDef) and it.name == name)


def _arguments_of(node: ast.ClassDef) -> Collection[str] | None:
    """Those of a class's constructor, and of its bases' where it hands all others on to them."""
    if any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list):
        plain = [ast.unparse(base) for base in node.bases] in ([], ['Settings'])
        return (
            {ast.unparse(it.target) for it in node.body if isinstance(it, ast.AnnAssign)}
            if plain
            else None
        )
    own: set[str] = set()
    inherits = True
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == '__init__':
            taken = function.args
            own = {one.arg for one in (*taken.args[1:], *taken.kwonlyargs)}
            if taken.kwarg and not _only_hands_on(function, taken.kwarg.arg):
                return None
            inherits = taken.kwarg is not None
    if not inherits:
        return own
    names = [ast.unparse(base).rpartition('.')[2] for base in node.bases]
    bases = [arguments_in_source(name) for name in names if name != node.name]
    if not bases or len(bases) < len(names) or any(base is None for base in bases):
        return None
    return own.union(*(base or () for base in bases))


def _only_hands_on(function: ast.FunctionDef, kwargs: str) -> bool:
    """Whether ``**kwargs`` go to the base class's constructor, and nowhere else."""
    nodes = list(ast.walk(function))
    uses = sum(isinstance(node, ast.Name) and node.id == kwargs for node in nodes)
    handed_on = sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == 'super().__init__'
        and any(it.arg is None and ast.unparse(it.value) == kwargs for it in node.keywords)
        for node in nodes
    )
    return uses == handed_on == 1
