"""Every script of examples/ runs as it is and shows that its technique holds less."""

import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.docs_pages import ROOT
from tests.marks import NEEDS_SHARDING

EXAMPLES = sorted((ROOT / 'examples').glob('*.py'))


@pytest.mark.parametrize(
    'example',
    [
        pytest.param(path, marks=NEEDS_SHARDING if path.stem == 'sharding' else (), id=path.stem)
        for path in EXAMPLES
    ],
)
def test_runs_and_holds_less(example, capsys):
    runpy.run_path(str(example), run_name='__main__')
    out = capsys.readouterr().out
    held = [[float(mib) for mib in re.findall(r'([\d.]+) MiB', line)] for line in out.splitlines()]
    held = [pair for pair in held if pair]
    if example.stem == 'compiled_blocks':  # on a CPU nothing is fused
        assert float(re.search(r'gradient (\S+)$', out.strip())[1]) < 1e-5
    elif example.stem == 'sharding':  # one rank holds everything
        assert [here == whole for whole, here in held] == [True]
    else:
        assert held
        assert all(less < plain for plain, less in held)


@pytest.mark.slow
@NEEDS_SHARDING
def test_two_ranks_hold_half_each():
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    out = subprocess.run(
        [*launch, ROOT / 'examples/sharding.py'],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    held = re.findall(r'parameters: ([\d.]+) MiB, on this rank ([\d.]+) MiB', out)
    assert len(held) == 2
    for whole, here in held:
        assert float(here) < 0.51 * float(whole)


@pytest.mark.parametrize('example', EXAMPLES, ids=lambda path: path.stem)
def test_is_short(example):
    assert len(example.read_text().splitlines()) <= 60
