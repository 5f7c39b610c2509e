"""The page of activation checkpointing shows the committed results, and they hold what it says."""

import importlib
import json
import sys

import pytest

from tests.docs_pages import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools/benchmarks')
    monkeypatch.delitem(sys.modules, 'activation_checkpointing', raising=False)
    return importlib.import_module('activation_checkpointing')


@pytest.fixture
def results():
    return json.loads((ROOT / 'docs/benchmarks/activation_checkpointing.json').read_text())


def test_the_page_shows_the_committed_results(benchmark, results):
    page = (ROOT / 'docs/techniques/activation_checkpointing.md').read_text()
    assert benchmark.tables(results)['checkpointing'] in page


def test_the_curve_lies_under_mmengine(results):
    ways = results['models'][0]['ways']
    theirs, ours = ways['MMEngine, every block'], ways['every block']
    assert ours['share'] <= theirs['share'] < 1 / 6
    assert ours['extra'] < theirs['extra']


def test_fake_tensors_count_as_real_ones_do(benchmark):
    figures = [
        benchmark.measure('test_vit', 2, benchmark.checkpoint_activations, fake=fake)
        for fake in (True, False)
    ]
    assert figures[0] == figures[1]
