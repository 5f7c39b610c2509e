"""Each tutorial, from a checkout and an empty folder to its results, just as its text says.

``python`` blocks that begin with a file's name are written to that file, others are run;
``console`` commands are carried out and print what stands below them.
"""

import contextlib
import io
import re
import runpy
import sys

import pytest
from mmengine import registry as mmengine_registry
from mmengine.registry import Registry

from memengine import registry as memengine_registry
from memengine.engine.cli.main import main
from tests.docs_pages import TUTORIALS, blocks_of, parametrize_pages
from tests.test_docs import assert_prints, commands_of, file_name, workplace  # noqa: F401


@pytest.fixture
def _registries_are_left_as_they_were():
    for ours in [it for it in vars(memengine_registry).values() if isinstance(it, Registry)]:
        ours.import_from_location()  # which registers functions with MMEngine's, for good
    registries = [it for it in vars(mmengine_registry).values() if isinstance(it, Registry)]
    before = [dict(registry.module_dict) for registry in registries]
    yield
    for registry, types in zip(registries, before, strict=True):
        registry.module_dict.clear()
        registry.module_dict.update(types)
    sys.modules.pop('memengine.registry.bare_names', None)


def carry_out(command, name):
    """Run a command in this process, with its own name for loggers: its status, what it prints."""
    (words,), out = commands_of(command), io.StringIO()
    if words[:2] in (['memengine', 'train'], ['memengine', 'test']):
        options = [] if '--cfg-options' in words else ['--cfg-options']
        words += [*options, f'experiment_name={name}']
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        if words[0] == 'python':
            runpy.run_path(words[1], run_name='__main__')
            return 0, out.getvalue()
        assert words[0] == 'memengine', f'a command that no test knows: {command}'
        return main(words[1:]), out.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures('_registries_are_left_as_they_were')
@parametrize_pages(TUTORIALS)
def test_as_it_says(page, workplace):  # noqa: F811
    namespace, printed = {'__name__': 'tutorial'}, ''
    for block in blocks_of(page):
        if block.kind == 'python' and (file := file_name(block.text)):
            (workplace / file).parent.mkdir(parents=True, exist_ok=True)
            (workplace / file).write_text(block.text)
        elif block.kind == 'python':
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, f'{page.name}:{block.line}', 'exec'), namespace)
            printed = out.getvalue()
        elif block.kind == 'console':
            for number, part in enumerate(re.split(r'^\$ ', block.text, flags=re.M)[1:]):
                command, expected = part.split('\n', 1)
                status, said = carry_out(command, f'tutorial_{page.stem}_{block.line}_{number}')
                assert status == ('error:' in expected), f'{command}\n{said[-3000:]}'
                assert_prints(expected, said)
        else:
            assert block.kind == 'text', f'line {block.line}: no test knows this block'
            assert_prints(block.text, printed)
