"""The walls of the house: which room may import which (docs/design.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'memengine'
PLAIN_TORCH = ('techniques', 'losses', 'memory')
GROUND_FLOOR = ('suggest', 'technique', '_torch_private')  # which import no room above


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
        of_kernels = {'triton'} if path.parent.name == 'kernels' else set()  # imported when used
        for module, line in imports(path):
            ours = module.startswith(tuple(f'memengine.{name}' for name in plain))
            known = ours or module.split('.')[0] in allowed | of_kernels
            assert known, f'{path}:{line} imports {module}'


def test_ground_floor_imports_no_room():
    for name in GROUND_FLOOR:
        place = PACKAGE / f'{name}.py'
        for path in [place] if place.exists() else files(name):
            for module, line in imports(path):
                ours = module.startswith('memengine.') and not module.startswith(
                    tuple(f'memengine.{floor}' for floor in GROUND_FLOOR)
                )
                assert not ours, f'{path}:{line} imports {module}'


def test_folders_have_at_most_thirteen_entries():
    """Beside what Python itself asks for: __init__.py, __main__.py, py.typed."""
    for folder in (PACKAGE, *(path.parent for path in PACKAGE.rglob('__init__.py'))):
        entries = [path.name for path in folder.iterdir() if not path.name.startswith('__')]
        assert len({*entries} - {'py.typed'}) <= 13, f'{folder} has {len(entries)} entries'


def is_private(dotted):
    return any(part.startswith('_') and not part.endswith('__') for part in dotted.split('.'))


def private_attributes_of_torch():
    """Attributes of torch's objects that begin with an underscore."""
    x = torch.ones(2, requires_grad=True)
    things = [x, x.exp().grad_fn, x.untyped_storage(), nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1)]
    things += [
        F.hardtanh(x).grad_fn,
        torch.optim.SGD([x]),
        torch.ops.aten.mm,
        torch.ops.aten.mm.default,
        FSDPModule,
    ]
    names = {name for thing in things for name in dir(thing)} | {'_orig_mod'}
    return {name for name in names if is_private(name)}


def private_uses(tree, private):
    """Lines of a module in which something is used that torch keeps private, and what."""
    of_torch = set()  # names that stand for torch or something of it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.asname or 'torch', alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(a.asname or a.name, f'{node.module}.{a.name}') for a in node.names]
        else:
            continue
        for name, full in found:
            if full.partition('.')[0] == 'torch':
                of_torch.add(name)
                if is_private(full):
                    yield node.lineno, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_others = node.attr in private and ast.unparse(node.value) != 'self'
            if is_others or ast.unparse(node).partition('.')[0] in of_torch:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith('attr'):  # getattr ...
            name = node.args[1]
            start = name.values[0] if isinstance(name, ast.JoinedStr) else name
            text = start.value if isinstance(start, ast.Constant) else ''
            if text in private or text.startswith('_saved_'):
                yield node.lineno, ast.unparse(node)


def test_private_parts_of_torch_are_used_in_one_place():
    private, home = private_attributes_of_torch(), PACKAGE / '_torch_private'
    uses = {
        f'{path.relative_to(ROOT)}:{line}: {use}'
        for path in sorted(PACKAGE.rglob('*.py'))
        for line, use in private_uses(ast.parse(path.read_text()), private)
        if home not in path.parents
    }
    assert not uses, 'give them a name in memengine/_torch_private:\n' + '\n'.join(sorted(uses))


@pytest.mark.parametrize(
    'code',
    [
        'from torch.utils import _pytree as pytree',
        'import torch._dynamo',
        'from torch.nn.modules.batchnorm import _NormBase',
        'import torch.distributed as dist\ndist.distributed_c10d._resolve_process_group(1)',
        'x.untyped_storage()._cdata',
        'self.layer._buffers',
        'node._saved_min_val',
        "getattr(node, f'_saved_{name}')",
        "hasattr(module, '_orig_mod')",
    ],
)
def test_private_parts_are_found(code):
    assert list(private_uses(ast.parse(code), private_attributes_of_torch()))


@pytest.mark.parametrize('code', ['self._base', "getattr(x, 'shape')", 'handle._undone'])
def test_others_are_not(code):
    assert not list(private_uses(ast.parse(code), private_attributes_of_torch()))


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
        if room.is_dir() and (room / '__init__.py').exists():
            on_ground = room.name in GROUND_FLOOR  # where a file is enough
            name = f'test_{room.name.strip("_")}.py' if on_ground else room.name
            found = (ROOT / 'tests').rglob(name) if on_ground else (ROOT / 'tests').glob(name)
            assert any(found), f'tests/{name} is missing'
