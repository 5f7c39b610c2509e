"""Perplexity, by hand."""

import math

import pytest
import torch

from memengine.evaluation import PerplexityMetric


def test_texts_count_by_their_tokens():
    metric = PerplexityMetric()
    losses = [(1.0, 3), (2.0, 1)]
    metric.process({}, [dict(loss=torch.tensor(x), predicted_tokens=n) for x, n in losses])
    assert metric.evaluate(2) == {'perplexity': pytest.approx(math.exp(5 / 4))}


def test_guessing_among_n_tokens_is_n():
    metric = PerplexityMetric(prefix='text')
    metric.process({}, [dict(loss=torch.tensor(50.0).log(), predicted_tokens=7)] * 3)
    assert metric.evaluate(3) == {'text/perplexity': pytest.approx(50.0)}


def test_a_loss_beyond_all_numbers_is_infinite():
    metric = PerplexityMetric()
    metric.process({}, [dict(loss=torch.tensor(800.0), predicted_tokens=3)])
    assert metric.evaluate(1) == {'perplexity': math.inf}
    metric.process({}, [dict(loss=torch.tensor(float('nan')), predicted_tokens=3)])
    assert math.isnan(metric.evaluate(1)['perplexity'])


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="no 'predicted_tokens'; it needs a CausalLanguageModel"):
        PerplexityMetric().process({}, [dict(feature=torch.zeros(2))])
