"""What lies beside the package says what is true of it: extras, citation, workflow, Dockerfile."""

import re
from configparser import ConfigParser
from pathlib import Path

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
