"""What lies beside the package says what is true of it: extras, citation, workflow, Dockerfile."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

import memengine

ROOT = Path(__file__).parents[1]
EXTRAS = ConfigParser()
EXTRAS.read(ROOT / 'setup.cfg')
EXTRAS = dict(EXTRAS['options.extras_require'])


def extras_in(text):
    """Extras that commands of pip name."""
    return {name for found in re.findall(r"\[([\w,]+)\]'", text) for name in found.split(',')}


def test_extras_for_each_purpose():
    assert {'clip', 'data', 'export', 'track'} <= EXTRAS.keys()
    needed = (ROOT / 'memengine/evaluation/after_training/exporters.py').read_text()
    advice = re.search(r'three packages: pip install ([\w ]+)"', needed)[1].split()
    assert EXTRAS['export'].split() == sorted(advice)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['version'] == memengine.__version__
    assert {'cff-version', 'message', 'title', 'authors'} <= citation.keys()


def test_the_workflow_and_the_image_name_what_is_there():
    workflow = yaml.safe_load((ROOT / '.github/workflows/check.yml').read_text())
    runs = [step['run'] for step in workflow['jobs']['check']['steps'] if 'run' in step]
    assert runs[-1] == 'make check'
    image = (ROOT / 'Dockerfile').read_text()
    named = extras_in('\n'.join([*runs, image]))
    assert named and named <= EXTRAS.keys()
    assert 'ENTRYPOINT ["memengine"]' in image


def run(command, folder, status=0, path=''):
    """What a command prints that ends with this status, with no checkout in sight."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """A folder with a source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp('built')
    left_out = shutil.ignore_patterns('.*', '_build', '__pycache__', '*.egg-info', 'tests')
    shutil.copytree(ROOT, folder / 'source', ignore=left_out)
    run([sys.executable, '-m', 'build', '--no-isolation', '-o', folder, 'source'], folder)
    return folder


@pytest.mark.slow
def test_what_is_built_is_fit_to_be_published(built):
    (wheel,), (source,) = built.glob('*.whl'), built.glob('*.tar.gz')
    said = run([sys.executable, '-m', 'twine', 'check', '--strict', wheel, source], built)
    assert said.count('PASSED') == 2
    files = {*zipfile.ZipFile(wheel).namelist()}
    configs = [file.relative_to(ROOT) for file in (ROOT / 'configs').rglob('*.py')]
    assert configs and files >= {f'memengine/{config}' for config in configs}
    in_c = {str(file.relative_to(ROOT)) for file in (ROOT / 'memengine').rglob('*.c')}
    assert in_c and files >= in_c


@pytest.mark.slow
def test_what_is_installed_needs_no_checkout(built, tmp_path):
    (wheel,) = built.glob('*.whl')
    install = ['install', '--no-deps', '--no-index', '--target', tmp_path / 'site', wheel]
    run([sys.executable, '-m', 'pip', *install], tmp_path)
    (tmp_path / 'mine.py').write_text("_base_ = 'memengine::dino_vit.py'\n")

    def memengine(*arguments, status=0):
        command = [sys.executable, tmp_path / 'site/bin/memengine', *arguments]
        return run(command, tmp_path, status, str(tmp_path / 'site'))

    assert 'memengine train dino_vit' in memengine()
    said = memengine('train', 'mine.py', '--cfg-options', 'model.head.nlayer=1', status=1)
    assert "model.head.nlayer: DINOHead takes no argument 'nlayer'" in said  # says its base
    few = """train_dataloader.num_workers=0 train_dataloader.persistent_workers=False
        val_dataloader=None val_cfg=None val_evaluator=None custom_hooks=None"""
    said = memengine('train', 'dino_vit', '--max-iters', '2', '--cfg-options', *few.split())
    assert 'Stopped after iteration 2' in said
