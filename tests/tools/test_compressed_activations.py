"""The benchmarks of dropped and quantised activations, at their quick size."""

import importlib
import json
import sys

import pytest
import torch
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer

from tests.docs_pages import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    """Loads a script of tools/benchmarks/."""
    monkeypatch.syspath_prepend(ROOT / 'tools/benchmarks')
    threads = torch.get_num_threads()

    def load(name, *words):
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, 'argv', [module.__file__, *map(str, words)])
        return module

    yield load
    torch.set_num_threads(threads)


def narrow_resnet(name, num_classes):
    return ResNet(BasicBlock, (1, 1, 1, 1), channels=(16, 32, 64, 128), num_classes=num_classes)


def test_a_model_keeps_less_by_every_way(benchmark, monkeypatch, tmp_path):
    page = tmp_path / 'page.md'
    mark = 'compressed_activations'
    page.write_text(f'<!-- {mark}:begin (x) -->\n<!-- {mark}:end -->\n')
    words = ['--quick', '--models', 'resnet18', '--repeats', 1, '--out', tmp_path, '--page', page]
    script = benchmark('compressed_activations', *words)
    monkeypatch.setattr(script.timm, 'create_model', narrow_resnet)
    script.main()
    rows = json.loads((tmp_path / f'{mark}.json').read_text())['models']['resnet18']
    plain = rows.pop('plain')
    assert (plain['relative'], plain['cosine'], plain['time']) == (0, pytest.approx(1), 1)
    for way, row in rows.items():
        assert row['same_loss'], way
        assert row['saved_mib'] < 0.9 * plain['saved_mib'], way
        assert row['relative'] > 0, way
    assert rows['8 bits']['relative'] < 0.1
    assert rows['8 bits']['relative'] < rows['4 bits']['relative'] < rows['2 bits']['relative']
    assert rows['DropIT 0.9']['saved_mib'] < rows['DropIT 0.5']['saved_mib']
    assert '| resnet18 | 8 bits |' in page.read_text()
    assert (tmp_path / 'compressed_activations.png').stat().st_size > 10_000


def test_learning_over_seeds(benchmark, monkeypatch, tmp_path):
    script = benchmark('dropit_learning', '--out', tmp_path, '--seeds', 2, '--epochs', 8)
    two = {way: script.WAYS[way] for way in ('plain', 'gamma 0.9')}
    monkeypatch.setattr(script, 'WAYS', two)
    monkeypatch.setattr(script, 'BATCH', 150)
    small = dict(depth=1, embed_dim=32, patch_size=4)
    monkeypatch.setattr(
        script,
        'VisionTransformer',
        lambda **settings: VisionTransformer(**{**settings, **small}),
    )
    script.main()
    ways = json.loads((tmp_path / 'dropit_learning.json').read_text())['ways']
    assert ways.keys() == two.keys()
    assert all(len(found) == 2 and min(found) > 15 for found in ways.values())  # chance is 10 %
    assert ways['plain'] != ways['gamma 0.9']
