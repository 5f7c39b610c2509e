"""The walls of the house: which room may import which (docs/design.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'memengine'
PLAIN_TORCH = ('techniques', 'losses', 'memory')
GROUND_FLOOR = ('_torch_private', 'precision', 'suggest')  # which import no room above


def imports(path):
    """Every module that a file imports, at any depth, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}:{node.lineno}: imports are absolute here'
            yield node.module, node.lineno


def files(room):
    found = sorted((PACKAGE / room).rglob('*.py'))
    assert found, f'there is no memengine/{room}'
    return found


@pytest.mark.parametrize('room', PLAIN_TORCH)
def test_plain_torch_rooms_import_torch_and_nothing_heavier(room):
    allowed = {'torch', 'numpy', *sys.stdlib_module_names}
    plain = [*PLAIN_TORCH, *GROUND_FLOOR]
    for path in files(room):
        for module, line in imports(path):
            ours = module.startswith(tuple(f'memengine.{name}' for name in plain))
            assert ours or module.split('.')[0] in allowed, f'{path}:{line} imports {module}'


@pytest.mark.parametrize(
    ('room', 'forbidden'),
    [
        ('engine', ('models', 'datasets', 'evaluation')),
        ('models', ('datasets', 'evaluation', 'visualization')),
        ('datasets', ('engine', 'models', 'evaluation', 'techniques')),
        ('evaluation', ('engine', 'models', 'datasets')),
    ],
)
def test_arrows(room, forbidden):
    for path in files(room):
        for module, line in imports(path):
            for other in forbidden:
                assert not module.startswith(f'memengine.{other}'), (
                    f'{path}:{line}: {room} must not import {other}'
                )


def run(code):
    return subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


HEAVY = {  # what a room does not import; one process imports them, in this order
    'memengine': {'torch', 'mmengine'},
    **{f'memengine.{room}': {'mmengine', 'timm', 'torchvision'} for room in PLAIN_TORCH},
    'memengine.datasets': {'timm', 'sklearn', 'skimage', 'mmcv'},
}


def test_importing_a_room_imports_nothing_heavier_than_it_needs():
    code = f"""
import importlib, sys
for room, heavy in {HEAVY}.items():
    importlib.import_module(room)
    print([room, *sorted(heavy & sys.modules.keys())])
"""
    assert run(code).splitlines() == [str([room]) for room in HEAVY]


def test_every_public_name_is_there():
    import memengine

    for name in memengine.__all__:
        assert getattr(memengine, name) is not None
    with pytest.raises(AttributeError, match='nonsense'):
        memengine.nonsense  # noqa: B018


def test_tests_mirror_the_package():
    for room in PACKAGE.iterdir():
        if (room / '__init__.py').exists() and room.name not in GROUND_FLOOR:
            assert (ROOT / 'tests' / room.name).is_dir(), f'tests/{room.name} is missing'
