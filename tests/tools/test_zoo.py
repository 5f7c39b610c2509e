"""The zoo: what becomes of a model is found, and the page says what the file of results does."""

import json
import sys
from functools import partial

import pytest
import torch
from torch import nn

from tests.docs_pages import ROOT
from tests.leaks import in_a_process

sys.path.insert(0, str(ROOT / 'tools'))

import zoo
from same_training import Way
from zoo_models import Entry

RESULTS = json.loads((ROOT / 'docs/zoo.json').read_text())


def doubled(model):
    model[3].bias.register_hook(lambda gradient: 2 * gradient)


def small_model():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3), nn.Tanh()]
    return nn.Sequential(*layers)


def test_what_becomes_of_a_model_is_found(monkeypatch):
    batch = partial(torch.randn, 4, 3, 8, 8, dtype=torch.float64)
    monkeypatch.setattr(zoo, 'zoo', lambda: {'small': Entry(small_model, batch)})
    monkeypatch.setitem(zoo.WAYS, 'with a fault', Way((doubled,)))
    found = in_a_process(zoo.outcomes_of, 'small')
    for way in ('recomputed_activations', 'activation_offload', 'efficient_conv_bn_eval'):
        assert found[way] == 'same'
    for way in ('optimizer_in_backward', 'accumulation', 'grad_cache'):
        assert found[way] == 'same'
    assert found['activation_checkpointing'].startswith('refused: ValueError')
    assert found['with a fault'].startswith('wrong')


def test_no_model_learned_something_else():
    models = RESULTS['models']
    assert len(models) >= 120
    libraries = {name.partition('/')[0] for name in models}
    assert libraries == {'timm', 'torchvision', 'transformers', 'open_clip'}
    outcomes = [what for of in models.values() for what in of.values()]
    assert not [what for what in outcomes if what.startswith('wrong')]


@pytest.mark.parametrize('mark', ['zoo', 'refusals', 'models'])
def test_the_page_says_what_the_results_do(mark):
    page = (ROOT / 'docs/zoo.md').read_text()
    assert zoo.tables(RESULTS)[mark] in page
