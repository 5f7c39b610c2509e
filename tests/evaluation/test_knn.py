"""Weighted k-NN against its definition, written out in float64."""

import math
from unittest import mock

import pytest
import torch

from memengine.evaluation import knn
from memengine.evaluation.knn import merge, nearest, unit_rows, vote, weighted_knn


def brute_force_votes(query, bank, labels, k, temperature, num_classes):
    """Votes [Q, C]: sort all similarities (equals: the earlier first), add up weights."""
    votes = torch.zeros(len(query), num_classes, dtype=torch.float64)
    for i, q in enumerate(query.double()):
        similarity = [
            (float(q @ b) / (float(q.norm()) * float(b.norm()) or 1.0)) for b in bank.double()
        ]
        order = sorted(range(len(bank)), key=lambda j: (-similarity[j], j))[:k]
        for j in order:
            votes[i, labels[j]] += math.exp(similarity[j] / temperature)
    return votes


def sample(seed, queries=40, bank=90, width=6, classes=5):
    """Features that overlap a good deal, so that votes are close."""
    torch.manual_seed(seed)
    centres = torch.randn(classes, width)
    labels = torch.randint(classes, (bank,))
    targets = torch.randint(classes, (queries,))
    noise = torch.randn(queries + bank, width) * 1.5
    return centres[targets] + noise[:queries], centres[labels] + noise[queries:], labels


@pytest.mark.parametrize('k', [1, 5, 20, 90])
@pytest.mark.parametrize('temperature', [0.07, 1.0])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_votes_and_predictions_are_those_of_the_definition(k, temperature, dtype):
    query, bank, labels = sample(k)
    query, bank = query.to(dtype), bank.to(dtype)
    expected = brute_force_votes(query, bank, labels, k, temperature, 5)
    keys, found = nearest(unit_rows(query), unit_rows(bank), labels, torch.arange(90), k)
    votes = vote(keys, found, temperature, 5)
    share = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(votes / votes.sum(1, keepdim=True), share, rtol=1e-5, atol=1e-7)
    predicted = weighted_knn(query, bank, labels, k, temperature)
    assert torch.equal(predicted, expected.argmax(1))
    assert len(predicted.unique()) > 1


@pytest.mark.parametrize('chunk_size', [1, 7, 1000])
@pytest.mark.parametrize('tile', [1, 13, 4096])
def test_chunks_do_not_change_the_result(chunk_size, tile):
    query, bank, labels = sample(3)
    expected = brute_force_votes(query, bank, labels, 10, 0.07, 5).argmax(1)
    with mock.patch.object(knn, '_TILE', tile):
        predicted = weighted_knn(query, bank, labels, k=10, chunk_size=chunk_size)
    assert torch.equal(predicted, expected)


@pytest.mark.parametrize('order', range(4))
def test_equals_are_decided_by_their_place(order):
    """Eight identical samples of different labels: the first two count, wherever they lie."""
    bank = torch.tensor([[2.0, 0.0]]).repeat(8, 1)
    labels, tie_breaks = torch.tensor([4, 2, 1, 0, 3, 3, 0, 1]), torch.arange(8)
    mixed = torch.randperm(8, generator=torch.Generator().manual_seed(order))
    keys, found = nearest(
        unit_rows(bank[:1]), unit_rows(bank)[mixed], labels[mixed], tie_breaks[mixed], 2
    )
    assert found.tolist() == [[4, 2]]
    assert (keys >> 32).tolist()[0] == [2**24] * 2


def test_merge_of_shards_is_the_whole():
    query, bank, labels = sample(5, width=16)
    # Corners of a cube are unit rows whose products no order of summation rounds.
    query, bank, tie_breaks = query.sign() / 4, bank.sign() / 4, torch.arange(90)
    whole = nearest(query, bank, labels, tie_breaks, 7)
    parts = [
        nearest(query, bank[s], labels[s], tie_breaks[s], 7)
        for s in (slice(0, 4), slice(4, 50), slice(50, 90))
    ]
    assert parts[0][0].shape == (40, 4)  # a shard with fewer than k
    merged = merge(torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1), 7)
    assert torch.equal(merged[0], whole[0]) and torch.equal(merged[1], whole[1])


def test_negative_similarity_and_low_temperature():
    """exp(-1 / 0.001) underflows and exp(1 / 0.001) overflows; their ratio decides."""
    bank, labels = torch.tensor([[-1.0, 0.0], [-1.0, 0.1]]), torch.tensor([0, 1])
    assert weighted_knn(torch.tensor([[1.0, 0.0]]), bank, labels, 2, 0.001).tolist() == [1]
    assert weighted_knn(torch.tensor([[-1.0, 0.0]]), bank, labels, 2, 0.001).tolist() == [0]


def test_one_query_by_hand():
    """Two far neighbours of one class outvote a near one of another, at a high temperature."""
    bank = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    labels, query = torch.tensor([0, 1, 1]), torch.tensor([[2.0, 0.0]])
    keys, found = nearest(unit_rows(query), unit_rows(bank), labels, torch.arange(3), 3)
    votes = vote(keys, found, 1.0, 2)[0]
    assert math.isclose(votes[1] / votes[0], 2 * math.exp(math.sqrt(0.5) - 1), rel_tol=1e-6)
    assert weighted_knn(query, bank, labels, 3, 1.0).tolist() == [1]
    assert weighted_knn(query, bank, labels, 3, 0.07).tolist() == [0]


def test_a_zero_feature_is_like_nothing():
    bank, labels = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    assert weighted_knn(torch.tensor([[1.0, 0.0]]), bank, labels, 1).tolist() == [1]
    assert weighted_knn(torch.tensor([[0.0, 0.0]]), bank, labels, 1).tolist() == [0]


def test_half_precision_features_are_compared_in_float32():
    query, bank, labels = sample(7)
    expected = brute_force_votes(query.half(), bank.half(), labels, 10, 0.07, 5).argmax(1)
    assert torch.equal(weighted_knn(query.half(), bank.half(), labels, 10), expected)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(k=91), r'k=91.*90 samples'),
        (dict(k=0), 'k must be positive, got 0'),
        (dict(temperature=0.0), 'temperature must be positive'),
        (dict(chunk_size=0), 'chunk_size must be positive'),
        (dict(query=torch.ones(2, 5)), r'\[2, 5\] and \[90, 6\]'),
        (dict(bank_labels=torch.ones(3)), r'bank_labels must be \[90\].*got \[3\]'),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    query, bank, labels = sample(0)
    with pytest.raises(ValueError, match=message):
        weighted_knn(**{'query': query, 'bank': bank, 'bank_labels': labels, **changes})


@pytest.mark.parametrize('scale', [1e-40, 1e-30, 1e-20, 1e25, 1e38])
def test_the_length_of_features_has_no_say(scale):
    query, bank, labels = (x.double() if x.is_floating_point() else x for x in sample(1))
    expected = weighted_knn(query, bank, labels, k=5)
    largest = max(query.abs().max(), bank.abs().max())
    query, bank = ((x / largest * scale).float() for x in (query, bank))
    if scale > 1e-38:
        assert torch.equal(weighted_knn(query, bank, labels, k=5), expected)
    lengths = unit_rows(query).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(len(query)))


def test_rows_of_ordinary_length_are_normalised_to_the_bit():
    rows = torch.cat(
        [torch.randn(50, 7) * 10.0 ** torch.arange(-6, 7)[:, None, None], torch.zeros(13, 1, 7)], 1
    )
    rows = rows.flatten(0, 1)
    assert torch.equal(unit_rows(rows), torch.nn.functional.normalize(rows, dim=1))
