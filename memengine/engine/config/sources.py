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
from importlib.metadata import entry_points
from pathlib import Path

from memengine.engine.config.error import FREE_KEYS

__all__ = [
    'SEARCHED',
    'TIMM',
    'arguments_in_source',
    'arguments_of_network',
    'is_a_word',
    'of_other_packages',
    'registered_types',
    'settings_in_source',
    'top_keys',
]

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
_TORCHVISION = ('torchvision/transforms/v2',)
SEARCHED = (*_SEARCHED_PACKAGES, *_TORCHVISION)
TIMM = ('timm/models', 'timm/layers')
_PREFIX = 'torchvision/'  # of its transforms' names
NOTHING_KNOWN: tuple[Collection[str], bool] = (frozenset(), True)
_TITLES = r"^(\w+) = (?:Registry|_child)\(\s*'([\w ]+)'"  # MODELS = Registry('model', ...)
_CONSTANT = r"^(\w+) = '(\w+)'$"
_REGISTERED = r'^@(\w+)\.register_module\(\)(?:\n@.*)*\nclass (\w+)'


@functools.cache
def _texts(places: tuple[str, ...] = _SEARCHED_PACKAGES) -> tuple[str, ...]:
    """All files of the places that are there."""
    files: set[Path] = set()
    for place in places:
        package, _, below = place.partition('/')
        if spec := importlib.util.find_spec(package):
            folders = [Path(root, below) for root in spec.submodule_search_locations or ()]
            files |= {file for folder in folders for file in folder.rglob('*.py')}
            files |= set() if folders else {Path(str(spec.origin))}
    return tuple(file.read_text(encoding='utf-8') for file in sorted(files))


@functools.cache
def of_other_packages() -> tuple[str, ...]:
    """Installed packages that have techniques of their own."""
    entries = entry_points(group='memengine.techniques')
    return tuple(sorted({entry.module.partition('.')[0] for entry in entries}))


def is_a_word(name: str, *places: str) -> bool:
    """Whether some code has it as a name or in quotes, so that it may mean something there."""
    pattern = re.compile(rf'[\'"]{name}[\'"]|\b{name}(?:\(| ?[:=])')
    return any(name in text and pattern.search(text) for text in _texts(places))


@functools.cache
def registered_types() -> dict[str, str]:
    """The classes that a decorator registers, torchvision's, and their registries' titles."""
    transforms = [_PREFIX + name for text in _texts(_TORCHVISION) for name in _classes_in(text)]
    titles = {key: title for text in _texts() for key, title in re.findall(_TITLES, text, re.M)}
    pairs = [pair for text in _texts() for pair in re.findall(_REGISTERED, text, re.M)]
    named = {name: titles[key].replace('_', ' ') for key, name in pairs if key in titles}
    return named | dict.fromkeys(transforms, 'transform')


def _classes_in(text: str) -> list[str]:
    return re.findall(r'^class ([A-Z]\w+)', text, re.M)


@functools.cache
def arguments_of_network(name: str) -> Collection[str]:
    """What the networks take of the file in which timm has a model; nothing if it is unknown."""
    text = next((it for it in _texts(TIMM) if f'\ndef {name}(' in it), '')
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    taken = [_arguments_of(node)[0] for node in classes]
    return frozenset(key for keys in taken if 'num_classes' in keys for key in keys)


def settings_in_source(technique: str) -> tuple[Collection[str], bool]:
    """The settings of a technique by its key, as :func:`arguments_in_source` says them."""
    return arguments_in_source(_techniques().get(technique, ('', False))[0])


@functools.cache
def _techniques() -> dict[str, tuple[str, bool]]:
    """The class of each technique's settings, and whether its key is one of a config's, by key."""
    found = {}
    for text in _texts():
        constants = dict(re.findall(_CONSTANT, text, re.M))
        for described in re.findall(r'^\w+ = Technique\(\n(.*?)^\)', text, re.M | re.S):
            said = dict(re.findall(r'^    (\w+)=(.+?),?$', described, re.M))
            key = constants.get(said['key'], said['key'].strip("'"))
            found[key] = said['settings'], 'apply' in said
    return found


@functools.cache
def top_keys() -> frozenset[str]:
    """What may stand at the top of a config, as its check says when nothing is registered anew."""
    table = next(text for text in _texts() if '\nTOP_SCHEMAS' in text)
    written = re.findall(r'^(?:TOP_\w+|AFTER_TRAINING)\b.*?^[})]', table, re.M | re.S)
    listed = {key for part in written for key in re.findall(r"^    '(\w+)'[:,]", part, re.M)}
    keyed = {key for key, (_, is_keyed) in _techniques().items() if is_keyed}
    return frozenset({*FREE_KEYS, *listed, *keyed, *arguments_in_source('Runner')[0]})


@functools.cache
def arguments_in_source(name: str) -> tuple[Collection[str], bool]:
    """What classes of a name take.

    Returns:
        The arguments that all of them name, and whether they may take others; none are known of a
        class that is not found, or has a base that is not found.
    """
    classes = list(_classes(name))
    prefix = _PREFIX if name.startswith(_PREFIX) else ''
    found = [_arguments_of(node, prefix, len(classes) == 1) for node in classes]
    return _together(found) if found else NOTHING_KNOWN


def _together(found: Collection[tuple[Collection[str], bool]]) -> tuple[Collection[str], bool]:
    if NOTHING_KNOWN in found:
        return NOTHING_KNOWN
    return frozenset().union(*(names for names, _ in found)), any(others for _, others in found)


def _classes(name: str) -> Iterator[ast.ClassDef]:
    bare = name.removeprefix(_PREFIX)
    for text in _texts() if name == bare else _texts(_TORCHVISION):
        if f'class {bare}' in text:
            body = ast.parse(text).body
            yield from (it for it in body if isinstance(it, ast.ClassDef) and it.name == bare)


def _arguments_of(
    node: ast.ClassDef, prefix: str = '', is_alone: bool = True
) -> tuple[Collection[str], bool]:
    """Those of a class's constructor, and of its bases' where it hands all others on to them.

    A base of the same name is looked at as one of the classes of that name, if there are others.
    """
    if any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list):
        plain = [ast.unparse(base) for base in node.bases] in ([], ['Settings'])
        fields = {ast.unparse(it.target) for it in node.body if isinstance(it, ast.AnnAssign)}
        return (fields, False) if plain else NOTHING_KNOWN
    own: frozenset[str] = frozenset()
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == '__init__':
            taken = function.args
            own = frozenset(one.arg for one in (*taken.args[1:], *taken.kwonlyargs))
            if not taken.kwarg or not _only_hands_on(function, taken.kwarg.arg):
                return own, taken.kwarg is not None
    names = [ast.unparse(base).rpartition('.')[2] for base in node.bases]
    others = [name for name in names if name.lstrip('_') != node.name]
    if is_alone and len(others) < len(names):
        return NOTHING_KNOWN
    return _together([(own, False), *(arguments_in_source(prefix + name) for name in others)])


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
