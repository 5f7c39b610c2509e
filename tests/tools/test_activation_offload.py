"""The offload benchmark counts, draws and fills its page, which shows the committed results."""

import importlib
import json
import sys
from itertools import pairwise

import pytest
import torch

from tests.docs_pages import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools/benchmarks')
    monkeypatch.delitem(sys.modules, 'activation_offload', raising=False)
    threads = torch.get_num_threads()
    yield importlib.import_module('activation_offload')
    torch.set_num_threads(threads)


def test_a_small_model(benchmark, monkeypatch, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('<!-- activation_offload:begin (x) -->\n<!-- activation_offload:end -->\n')
    words = ['--quick', '--out', str(tmp_path), '--page', str(page)]
    monkeypatch.setattr(sys, 'argv', [benchmark.__file__, *words])
    names = ('look-ahead 0', 'look-ahead 4', 'from 1 KiB on', 'from 256 KiB on', 'in memory')
    monkeypatch.setattr(benchmark, 'WAYS', {name: benchmark.WAYS[name] for name in names})
    monkeypatch.setattr(benchmark, 'AHEAD', (0, 4))
    monkeypatch.setattr(benchmark, 'SIZES', (2**10, 2**18))
    benchmark.main()
    ways = json.loads((tmp_path / 'activation_offload.json').read_text())['ways']
    all_moved = ways['from 1 KiB on']
    assert all_moved['kept_mib'] + all_moved['moved_mib'] == pytest.approx(
        ways['plain']['kept_mib'], rel=0.02
    )
    assert '| from 1 KiB on |' in page.read_text()
    assert (tmp_path / 'activation_offload.png').stat().st_size > 10_000


def test_the_page_shows_the_committed_results_and_they_hold_what_it_says(benchmark):
    results = json.loads((ROOT / 'docs/benchmarks/activation_offload.json').read_text())
    page = (ROOT / 'docs/techniques/activation_checkpointing.md').read_text()
    assert benchmark.tables(results)['activation_offload'] in page
    ways = results['ways']
    ahead = [ways[f'look-ahead {n}'] for n in benchmark.AHEAD]
    assert len({way['kept_mib'] for way in ahead}) == 1
    assert all(a['allocated_mib'] < b['allocated_mib'] for a, b in pairwise(ahead))
    sizes = [ways[f'from {n // 1024} KiB on'] for n in benchmark.SIZES]
    assert all(a['kept_mib'] <= b['kept_mib'] for a, b in pairwise(sizes))
    for way in [*ahead, *sizes]:
        assert way['kept_mib'] + way['moved_mib'] == pytest.approx(
            ways['plain']['kept_mib'], rel=0.02
        )
