"""A misspelt key is refused before torch and MMEngine are imported."""

import subprocess
import sys

import pytest

from memengine.engine.config.check import check_config, known_keys
from memengine.engine.config.early import KNOWN, check_top_keys
from memengine.engine.config.error import ConfigError
from memengine.engine.config.file import load_config
from tests.docs_pages import ROOT
from tests.test_configs import CONFIGS


def write(tmp_path, text, name='config.py'):
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize(
    'arguments',
    [['typo.py'], ['fine.py', '--cfg-options', 'modl.type=1']],
)
@pytest.mark.parametrize('command', ['train', 'predict'])
def test_a_misspelt_key_is_answered_without_torch(tmp_path, command, arguments):
    write(tmp_path, "modl = dict(type='DINO')", 'typo.py')
    write(tmp_path, "model = dict(type='DINO')", 'fine.py')
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from memengine.engine.cli.main import main
status = main({[command, *arguments]!r})
print(status, [name for name in ('torch', 'mmengine', 'numpy') if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == "memengine: error: unknown key 'modl': did you mean 'model'?\n"
    assert done.stdout == '1 []\n'


def test_keys_are_those_of_the_whole_check():
    assert known_keys({}) >= KNOWN


def test_no_key_that_means_something_is_refused(tmp_path):
    keys = sorted(known_keys({}))
    file = write(tmp_path, ''.join(f'{key} = dict()\n' for key in keys))
    check_top_keys(file, {f'{key}.entry': 1 for key in keys})


@pytest.mark.parametrize('name', CONFIGS)
def test_configs_pass(name):
    check_top_keys(ROOT / name, {'train_cfg.max_epochs': 1})


def test_all_is_said_at_once_and_as_the_whole_check_says_it(tmp_path):
    write(tmp_path, 'train_cgf = dict(max_epochs=1)', 'base.py')
    text = (
        "_base_ = 'base.py'\nmodel = dict(type='DINO', head=dict(type='DINOHead'))\nresme = True\n"
    )
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as early:
        check_top_keys(file, {'lod_from': 'x'})
    with pytest.raises(ConfigError) as whole:
        check_config(load_config(file))
    assert early.value.problems == [
        "unknown key 'lod_from': did you mean 'load_from'?",
        "unknown key 'resme': did you mean 'resume'?",
        "unknown key 'train_cgf': did you mean 'train_cfg'?",
    ]
    assert set(early.value.problems[1:]) <= set(whole.value.problems)


@pytest.mark.parametrize(
    'text',
    [
        'modl = dict()\nmodel = modl',  # a name of the file's own
        "custom_imports = dict(imports=['mine'])\nmodl = dict()",  # which may be mine's
        "runner_type = 'Mine'\nmodl = dict()",
        'model = dict()\nmodl = dict()\nwork_dir = "x"',  # as a run writes it
        'modl = len([1])',
        'modl = (',
        'something = 3',
    ],
)
def test_what_the_text_does_not_tell_is_left_to_the_whole_check(tmp_path, text):
    check_top_keys(write(tmp_path, text), {})


def test_other_files_are_left_to_the_whole_check(tmp_path):
    check_top_keys(write(tmp_path, '{"modl": 1}', 'config.json'), {'modl': 1})
    check_top_keys(tmp_path / 'nowhere.py', {'modl': 1})
