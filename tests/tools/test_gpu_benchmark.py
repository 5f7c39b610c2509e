"""The benchmark for the day a GPU is there: it says so without one, and runs whole on any."""

import importlib
import json
import sys

import pytest
import torch

from tests.docs_pages import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools/benchmarks')
    monkeypatch.delitem(sys.modules, 'gpu', raising=False)
    return importlib.import_module('gpu')


def run(benchmark, monkeypatch, *words):
    monkeypatch.setattr(sys, 'argv', [benchmark.__file__, *map(str, words)])
    benchmark.main()


def test_without_a_gpu_it_says_so_and_writes_nothing(benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit, match='no GPU'):
        run(benchmark, monkeypatch, '--out', tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


@pytest.mark.gpu
def test_all_of_it_runs(benchmark, monkeypatch, tmp_path):
    run(benchmark, monkeypatch, '--quick', '--out', tmp_path)
    results = json.loads((tmp_path / 'gpu.json').read_text())
    assert list(results['ways']) == list(benchmark.WAYS)
    assert len(results['losses']) == 2 * 5
    assert len(results['bits']) == 5
    assert list(results['codecs']) == list(benchmark.CODECS)
    page = (tmp_path / 'gpu.md').read_text()
    assert all(f'| {way} |' in page for way in benchmark.WAYS)
