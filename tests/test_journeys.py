"""Ten journeys from an empty folder to their results, each command in a process of its own.

``python -m tests.journeys --fresh`` carries them out in a new environment, too.
"""

import os

import pytest

from tests.docs_pages import ROOT
from tests.journeys.carry_out import JOURNEYS, carry_out
from tests.journeys.warm import warm_programs


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    with warm_programs(tmp_path_factory.mktemp('bin')) as programs:
        paths = dict(PATH=f'{programs}{os.pathsep}{os.environ["PATH"]}', PYTHONPATH=str(ROOT))
        yield {**os.environ, **paths, 'OMP_NUM_THREADS': '1'}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # commands have limits of their own
@pytest.mark.parametrize('journey', JOURNEYS, ids=lambda it: it.stem)
def test_it_arrives(journey, tmp_path, environment):
    if lacking := carry_out(journey, tmp_path, environment):
        pytest.skip(lacking.strip())


def test_there_are_ten():
    assert len(JOURNEYS) == 10
