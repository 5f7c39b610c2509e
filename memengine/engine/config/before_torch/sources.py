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
from memengine.engine.config.schema.bounds_of_settings import TOP_BOUNDS

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
_EXACT = ('memengine', 'mmengine', 'torch/optim', 'torch/utils/data')
TIMM = ('timm/models', 'timm/layers')
_BUILDERS = ('timm/models/_builder.py', 'timm/models/_factory.py')
PREFIX = 'torchvision/'  # of its transforms' names
NOTHING_KNOWN: tuple[Collection[str], bool] = (frozenset(), True)
_TITLES = r"^(\w+) = (?:Registry|_child)\(\s*'([\w ]+)'"  # MODELS = Registry('model', ...)
_CONSTANT = r"^(\w+) = '(\w+)'$"
_OPTIMIZER = r'^class (\w+)\((?:Optimizer|Adam)\)'
_NETWORK = r'^@register_model\ndef (\w+)\('
_BUILT = r'\bbuild_model_with_cfg\(\s*(\w+)'
_CLASS_BODY = r'^class \w.*?(?=^[^\s)#])'
_DECORATORS = r'^(?:@.*\n(?:[ )].*\n)*)*'
_REGISTERED = r'^@(?:ROOT_)?(\w+)\.register_module\(\)(?:\n@.*)*\n(?:class|def) (\w+)'


def _texts(places: tuple[str, ...] = _SEARCHED_PACKAGES) -> tuple[str, ...]:
    """All files of the places that are there."""
    return tuple(text for place in places for text in _texts_in(place))


@functools.cache
def _texts_in(place: str) -> tuple[str, ...]:
    package, _, below = place.partition('/')
    spec = importlib.util.find_spec(package)
    if spec is None:
        return ()
    folders = [Path(root, below) for root in spec.submodule_search_locations or ()]
    files = [it for it in folders if it.is_file()]
    files += [file for folder in folders for file in folder.rglob('*.py')]
    files += [] if folders else [Path(str(spec.origin))]
    return tuple(file.read_text(encoding='utf-8') for file in sorted(files))


@functools.cache
def of_other_packages() -> tuple[str, ...]:
    """Installed packages that have techniques of their own."""
    entries = entry_points(group='memengine.techniques')
    return tuple(sorted({entry.module.partition('.')[0] for entry in entries}))


def is_a_word(name: str, *places: str, only_quoted: bool = False) -> bool:
    """Whether some code has it as a name or in quotes, so that it may mean something there."""
    word = re.escape(name)
    as_name = '' if only_quoted else rf'|\b{word}(?:\(| ?[:=])'
    pattern = re.compile(rf'[\'"]{word}[\'"]{as_name}')
    return any(name in text and pattern.search(text) for text in _texts(places))


@functools.cache
def class_in_source(name: str, after: str = '') -> tuple[ast.ClassDef, str] | None:
    """The one class of a name whose hints are what it takes, and the place in which it is.

    A package's own class goes before those that it builds on, which come after its place.
    """
    places = _TORCHVISION if name.startswith(PREFIX) else _EXACT
    for place in places[places.index(after) + 1 if after else 0 :]:
        if found := list(_classes(name, (place,))):
            return (found[0], place) if len(found) == 1 else None
    return None


@functools.cache
def assigned_in_source(name: str) -> ast.expr | None:
    """What a name is set to at the top of our files, if it is one thing wherever that is done."""
    pattern = re.compile(rf'^{name}(?:: TypeAlias)? = (.+)$', re.M)
    texts = (text for text in _texts(('memengine',)) if name in text)
    found = {value for text in texts for value in pattern.findall(text)}
    try:
        return ast.parse(found.pop(), mode='eval').body if len(found) == 1 else None
    except SyntaxError:  # it goes on in the next line
        return None


@functools.cache
def registered_types() -> dict[str, str]:
    """The titles of registries by what a decorator registers there, or torch has, by name."""
    optimizers = [
        name for text in _texts(('torch/optim',)) for name in re.findall(_OPTIMIZER, text, re.M)
    ]
    transforms = [PREFIX + name for text in _texts(_TORCHVISION) for name in _classes_in(text)]
    titles = {key: title for text in _texts() for key, title in re.findall(_TITLES, text, re.M)}
    pairs = [pair for text in _texts() for pair in re.findall(_REGISTERED, text, re.M)]
    named = {name: titles[key].replace('_', ' ') for key, name in pairs if key in titles}
    named |= dict.fromkeys(optimizers, 'optimizer')
    return named | dict.fromkeys(transforms, 'transform')


def _classes_in(text: str) -> list[str]:
    return re.findall(r'^class ([A-Z]\w+)', text, re.M)


@functools.cache
def networks() -> Collection[str]:
    """The names of timm's models."""
    return frozenset(name for text in _texts(TIMM) for name in re.findall(_NETWORK, text, re.M))


@functools.cache
def arguments_of_network(name: str, asked: frozenset[str]) -> tuple[Collection[str], bool]:
    """What the networks take of the file in which timm has a model; nothing if it is unknown.

    Args:
        name: Of the model.
        asked: Arguments that it is to have.

    Returns:
        The arguments, and whether others may be taken: by a network of another file, by one that
        takes any, or by what builds them, which may build another network then.
    """
    classes = network_classes(name)
    taken = frozenset(key for node in classes for key in _arguments_of(node)[0])
    text = _network_text(name)
    built = {*re.findall(_BUILT, text)}
    is_whole = bool(built) and built <= {it.name for it in classes if not _arguments_of(it)[1]}
    builders = re.sub(_CLASS_BODY, '', '\n'.join((text, *_texts(_BUILDERS))), flags=re.M | re.S)
    by_builders = {*re.findall(r'\w+', builders)} - taken
    return taken, not is_whole or bool(asked & by_builders)


@functools.cache
def network_classes(name: str) -> tuple[ast.ClassDef, ...]:
    """The networks of the file in which timm has a model."""
    found = _classes_of(_network_text(name))
    return tuple(it for it in found if 'num_classes' in _arguments_of(it)[0])


def _network_text(name: str) -> str:
    """The file in which timm has a model."""
    return next((it for it in _texts(TIMM) if f'\ndef {name}(' in it), '')


@functools.cache
def techniques_in_source() -> dict[str, dict[str, str]]:
    """What techniques' descriptions say, as it is written there, by their keys."""
    found = {}
    for text in _texts():
        constants = dict(re.findall(_CONSTANT, text, re.M))
        for described in re.findall(r'^\w+ = Technique\(\n(.*?)^\)', text, re.M | re.S):
            said = dict(re.findall(r'^    (\w+)=(.+?),?$', described, re.M))
            found[constants.get(said['key'], said['key'].strip("'"))] = said
    return found


@functools.cache
def top_keys() -> frozenset[str]:
    """What may stand at the top of a config, as its check says when nothing is registered anew."""
    table = next(text for text in _texts() if '\nTOP_SCHEMAS' in text)
    written = re.findall(r'^(?:TOP_\w+|AFTER_TRAINING)\b.*?^[})]', table, re.M | re.S)
    listed = {key for part in written for key in re.findall(r"^    '(\w+)'[:,]", part, re.M)}
    keyed = {key for key, said in techniques_in_source().items() if 'apply' in said}
    runner = arguments_in_source('Runner')[0]
    return frozenset({*FREE_KEYS, *TOP_BOUNDS, *listed, *keyed, *runner})


@functools.cache
def arguments_in_source(name: str) -> tuple[Collection[str], bool]:
    """What classes of a name take.

    Returns:
        The arguments that all of them name, and whether they may take others; none are known of a
        class that is not found, or has a base that is not found.
    """
    classes = list(_classes(name))
    prefix = PREFIX if name.startswith(PREFIX) else ''
    found = [_arguments_of(node, prefix, len(classes) == 1) for node in classes]
    return _together(found) if found else NOTHING_KNOWN


def _together(found: Collection[tuple[Collection[str], bool]]) -> tuple[Collection[str], bool]:
    if NOTHING_KNOWN in found:
        return NOTHING_KNOWN
    return frozenset().union(*(names for names, _ in found)), any(others for _, others in found)


def _classes(name: str, places: tuple[str, ...] = ()) -> Iterator[ast.ClassDef]:
    """All classes of a type's name, also where it is not registered."""
    bare = name.removeprefix(PREFIX)
    for text in _texts(places or (_SEARCHED_PACKAGES if name == bare else _TORCHVISION)):
        if bare.isidentifier() and f'class {bare}' in text:
            yield from _classes_of(text, bare)


def _classes_of(text: str, name: str = r'\w+') -> Iterator[ast.ClassDef]:
    """Those of a file; only their own lines are parsed, which is most of what looking costs."""
    for found in re.finditer(rf'{_DECORATORS}class {name}\b', text, re.M):
        end = re.compile(r'^[^\s)#]', re.M).search(text, found.end())
        try:
            body = ast.parse(text[found.start() : end.start() if end else None]).body
        except SyntaxError:  # a text in it begins at the margin
            body = [
                it for it in ast.parse(text).body if re.fullmatch(name, getattr(it, 'name', ''))
            ]
        yield from (it for it in body if isinstance(it, ast.ClassDef))


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
