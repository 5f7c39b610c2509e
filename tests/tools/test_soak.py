"""The soak, for a moment: what it does to a training leaves no trace."""

import json
import subprocess
import sys

import pytest

from tests.docs_pages import ROOT


@pytest.mark.slow
@pytest.mark.fault('killed at any moment, in a save, too', '`--resume` goes on bit for bit')
def test_kills_leave_no_trace(tmp_path):
    results = tmp_path / 'results.json'
    words = ['--kills-only', '8', '--iterations', '30', '--results', results]
    command = [sys.executable, ROOT / 'tools/soak.py', *map(str, words)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(results.read_text())['kills, seed 0']
    assert sum(result['faults'].values()) == 8
    assert result['campaigns'] > 1
