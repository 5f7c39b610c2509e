"""Accuracy, counted by hand."""

import pytest
import torch

from memengine.evaluation import AccuracyMetric
from memengine.testing import run_ranks

LOGITS = torch.tensor([[3.0, 2, 1], [1, 3, 2], [3, 2, 1], [1, 2, 3]])
LABELS = torch.tensor([0, 2, 2, 2])  # right at guess 1, 2, 3, 1


def evaluate(metric, **samples):
    batch = dict(data_samples=dict(label=LABELS, **samples))
    metric.process(batch, [{'logits': row} for row in LOGITS])
    return metric.evaluate(len(LABELS))


def test_percentages_by_hand():
    assert evaluate(AccuracyMetric((1, 2, 3))) == {'top1': 50.0, 'top2': 75.0, 'top3': 100.0}
    assert evaluate(AccuracyMetric(prefix='probe')) == {'probe/top1': 50.0}


def test_the_bank_does_not_count():
    bank = torch.tensor([True, False, False, False])
    assert evaluate(AccuracyMetric((1, 2)), bank=bank)['top1'] == pytest.approx(100 / 3)
    with pytest.raises(ValueError, match='no samples but those of the bank'):
        evaluate(AccuracyMetric(), bank=torch.ones(4, dtype=torch.bool))


def accuracy_of_rank(rank, ranks):
    """As ``DefaultSampler`` has it: 4 samples on 3 ranks are 6, the first two of them twice."""
    rows = torch.tensor([0, 1, 2, 3, 0, 1])[rank::ranks]
    bank = torch.tensor([False, False, False, True])
    metric = AccuracyMetric()
    batch = dict(data_samples=dict(label=LABELS[rows], bank=bank[rows]))
    metric.process(batch, [{'logits': row} for row in LOGITS[rows]])
    return metric.evaluate(len(LABELS))


def test_what_a_sampler_repeats_counts_once():
    assert run_ranks(3, accuracy_of_rank) == [{'top1': pytest.approx(100 / 3)}] * 3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match='topk'):
        AccuracyMetric(())
    with pytest.raises(ValueError, match='topk'):
        AccuracyMetric((0, 1))
    with pytest.raises(ValueError, match='exceeds the 3 classes'):
        evaluate(AccuracyMetric((4,)))
    with pytest.raises(ValueError, match="no 'logits'"):
        AccuracyMetric().process(dict(data_samples=dict(label=LABELS)), [{'feature': LOGITS[0]}])


def test_what_is_no_number_and_what_has_no_label_make_no_figure():
    batch = dict(data_samples=dict(label=torch.tensor([0, -1, 2, 2])))
    rows = [{'logits': row} for row in LOGITS]
    with pytest.raises(ValueError, match='1 of 4 samples have no label'):
        AccuracyMetric().process(batch, rows)
    batch['data_samples']['bank'] = torch.tensor([False, True, False, False])
    AccuracyMetric().process(batch, rows)
    rows[2] = {'logits': LOGITS[2] * float('nan')}
    with pytest.raises(ValueError, match='the outputs of 1 of 4 samples are NaN'):
        AccuracyMetric().process(batch, rows)


def test_what_stands_in_for_an_unreadable_image_counts_once():
    """With ``on_error='skip'`` the next sample comes twice, as itself and in the other's place."""
    rows = torch.tensor([0, 2, 2, 3])
    batch = dict(data_samples=dict(label=LABELS[rows], index=rows))
    metric = AccuracyMetric()
    metric.process(batch, [{'logits': row} for row in LOGITS[rows]])
    assert metric.evaluate(len(rows)) == {'top1': pytest.approx(200 / 3)}
