"""The page of activation checkpointing shows the committed results, and they hold what it says."""

import importlib
import itertools
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


def test_half_of_the_bytes_costs_what_the_page_says(results):
    """Each further activation costs one product of width times width; the bound is by hand."""
    ways, width, tokens, depth = results['models'][0]['ways'], 384, 197, 12
    product = 2 * tokens * width**2 / 1e9
    unit = tokens * width * 4 / 2**20
    kept = (depth - 1) * 10 + 16  # activations at the peak with all products kept
    given_up = kept - 0.5 * ways['plain']['mib'] / unit
    least = given_up * product / ways['plain']['gflop']
    half = ways['budget 0.505']
    assert half['share'] <= 0.5
    assert 0.99 * least < half['extra'] < least + 0.001
    assert ways['budget 0.525']['kept_share'] <= 0.5
    assert ways['budget 0.525']['extra'] < 0.055


def test_budgets_lie_on_the_line_of_torch_s_own(results):
    """Between two of torch's points, none of ours costs more than their line and a half percent."""
    ways = results['models'][0]['ways']
    ours = [f for name, f in ways.items() if name.startswith('budget')]
    theirs = [f for name, f in ways.items() if name.startswith('torch')]
    for less, more in itertools.pairwise(sorted(theirs, key=lambda f: f['kept_share'])):
        for mine in ours:
            if less['kept_share'] <= mine['kept_share'] <= more['kept_share']:
                part = (mine['kept_share'] - less['kept_share']) / (
                    more['kept_share'] - less['kept_share']
                )
                line = less['extra'] + part * (more['extra'] - less['extra'])
                assert mine['extra'] < line + 0.005


def test_fake_tensors_count_as_real_ones_do(benchmark):
    figures = [
        benchmark.measure('test_vit', 2, benchmark.checkpoint_activations, fake=fake)
        for fake in (True, False)
    ]
    assert figures[0] == figures[1]
