"""A step leaves no tensor behind, with any technique."""

import json
import subprocess
import sys

import pytest

from tests.docs_pages import ROOT


@pytest.mark.slow
@pytest.mark.fault('a long training', 'no step leaves a tensor behind, with any technique')
def test_nothing_is_left_of_a_step(tmp_path):
    results = tmp_path / 'results.json'
    words = ['--steps', '40', '--results', str(results)]
    ran = subprocess.run(
        [sys.executable, '-m', 'tests.leaks', *words], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    left = json.loads(results.read_text())['leaks']['left']
    assert len(left) > 12
    assert all(one['tensors'] == one['tensor_bytes_a_step'] == 0 for one in left.values())
