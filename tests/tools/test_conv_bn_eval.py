"""The Conv-BN benchmark counts, draws and fills its page, which shows the committed results."""

import importlib
import json
import sys

import pytest

from tests.docs_pages import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools/benchmarks')
    monkeypatch.delitem(sys.modules, 'conv_bn_eval', raising=False)
    return importlib.import_module('conv_bn_eval')


def test_one_model(benchmark, monkeypatch, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('<!-- conv_bn_eval:begin (x) -->\n<!-- conv_bn_eval:end -->\n')
    words = ['--quick', '--out', str(tmp_path), '--page', str(page)]
    monkeypatch.setattr(sys, 'argv', [benchmark.__file__, *words])
    benchmark.main()
    facts = json.loads((tmp_path / 'conv_bn_eval.json').read_text())['models']['resnet18']
    assert facts['pairs'] == {'exist': 20, 'plain': 0, 'memengine': 20, 'MMEngine': 20}
    assert len({*facts['flops'].values()}) == 1
    assert '| resnet18 | 20 | 20 | 20 | 45% | 677 | -45% |' in page.read_text()
    assert (tmp_path / 'conv_bn_eval.png').stat().st_size > 10_000


def test_the_page_shows_the_committed_results(benchmark):
    results = json.loads((ROOT / 'docs/benchmarks/conv_bn_eval.json').read_text())
    table = benchmark.tables(results)['conv_bn_eval']
    assert table in (ROOT / 'docs/techniques/conv_bn_eval.md').read_text()


def test_all_of_what_batchnorm_reads_from_convolutions_is_saved():
    models = json.loads((ROOT / 'docs/benchmarks/conv_bn_eval.json').read_text())['models']
    for name, facts in models.items():
        pairs, mib = facts['pairs'], facts['mib']
        plain, ours = mib['plain'][0], mib['memengine'][0]
        assert pairs['memengine'] == pairs['exist']
        assert plain - ours >= 0.995 * facts['between_mib']
        assert ours <= 0.62 * plain or name == 'densenet121'  # whose other layers bound it
