"""The benchmark of DropIT's codec, at its quick size."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.docs_pages import ROOT

PEER = """
class DropITer:
    def __init__(self, strategy, gamma):
        self.reserve = 1 - gamma

    def select(self, tensor, ctx):
        ctx.numel = tensor.numel()
        ctx.indices = tensor.reshape(-1).abs().topk(int(ctx.numel * self.reserve)).indices.int()
        return tensor.reshape(-1)[ctx.indices]

    def pad(self, values, ctx):
        indices = ctx.indices.long()
        del ctx.indices
        return values.new_zeros(ctx.numel).scatter_(0, indices, values)
"""


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools/benchmarks')
    script = __import__('dropit_selection')
    threads = torch.get_num_threads()

    def run(*words):
        name = ROOT / 'tools/benchmarks/dropit_selection.py'
        monkeypatch.setattr(sys, 'argv', [str(name), *map(str, words)])
        script.main()

    yield run
    torch.set_num_threads(threads)
    for name in ('dropit', 'dropit.dropiter'):
        sys.modules.pop(name, None)


def results_in(folder):
    inputs = json.loads((folder / 'dropit_selection.json').read_text())['inputs']
    return {run['gamma']: run['rows'] for run in inputs}


def test_bytes_and_what_is_lost(run, tmp_path, capsys):
    run('--quick', '--out', tmp_path)
    by_gamma = results_in(tmp_path)
    for rows in by_gamma.values():
        assert rows['mink']['error'] == pytest.approx(rows['block_mink']['error'], rel=0.01)
        assert rows['block_mink']['error'] < rows['random']['error'] < 1
        assert rows['block_mink, 16 bits']['bytes_share'] < rows['block_mink']['bytes_share']
        assert all(row['encode_ns_per_element'] > 0 for row in rows.values())
        assert 'encode_speedup' not in rows['mink']
    shares = [by_gamma[gamma]['block_mink']['bytes_share'] for gamma in (0.5, 0.7, 0.9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(26 * 5 / 1024, rel=1e-4)
    assert '| 0.9 | block_mink | 0.127 |' in capsys.readouterr().out


def test_the_reference_beside_it(run, tmp_path):
    package = tmp_path / 'peer/dropit'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text('import transformers\nfrom . import dropiter\n')
    (package / 'dropiter.py').write_text(PEER)
    run('--quick', '--out', tmp_path, '--peers', tmp_path / 'peer')
    rows = results_in(tmp_path)[0.9]
    reference = rows['reference DropIT']
    assert reference['bytes_share'] == pytest.approx(0.2, rel=0.01), 'indices count'
    assert reference['error'] == pytest.approx(rows['mink']['error'], rel=1e-4)
    assert reference['encode_speedup'] == 1
    assert not isinstance(sys.modules.get('transformers'), SimpleNamespace)


def test_a_folder_without_the_reference_is_an_error(run, tmp_path):
    with pytest.raises(ValueError, match='--peers: no package dropit in'):
        run('--quick', '--out', tmp_path, '--peers', tmp_path)
