"""Zero-shot classification and retrieval, against loops."""

import pytest
import torch
from torch.nn import functional as F

from memengine.evaluation import RetrievalMetric, ZeroShotMetric
from memengine.evaluation.image_text import recall_at, zero_shot_accuracy
from memengine.testing import run_ranks

N, D, CLASSES = 30, 4, 5


def embeddings(seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) % CLASSES
    centres = torch.randn(CLASSES, D, generator=generator)
    noise = torch.randn(2, N, D, generator=generator)
    return centres[labels] + noise[0], centres[labels] + 0.5 * noise[1], labels


def evaluate(metric, images, texts, labels, step=7):
    for start in range(0, len(labels), step):
        rows = range(start, min(start + step, len(labels)))
        samples = [{'feature': images[row], 'text_feature': texts[row]} for row in rows]
        given = dict(label=labels[list(rows)], index=torch.tensor(list(rows)))
        metric.process(dict(data_samples=given), samples)
    return metric.evaluate(len(labels))


def test_zero_shot_by_hand():
    images, texts, labels = embeddings()
    right = 0
    for image, label in zip(images, labels, strict=True):
        scores = []
        for one in range(CLASSES):
            own = [F.normalize(t, dim=0) for t, x in zip(texts, labels, strict=True) if x == one]
            scores.append(F.cosine_similarity(torch.stack(own).mean(0), image, dim=0).item())
        right += scores.index(max(scores)) == label.item()
    expected = 100 * right / N
    assert 20 < expected < 100
    assert evaluate(ZeroShotMetric(), images, texts, labels) == {
        'zero_shot_top1': pytest.approx(expected)
    }


def test_classes_need_not_be_numbered_from_zero():
    images, texts, labels = embeddings()
    assert zero_shot_accuracy(images, texts, 10 * labels + 3) == pytest.approx(
        zero_shot_accuracy(images, texts, labels)
    )


@pytest.mark.parametrize('match', ['index', 'label'])
def test_recall_by_hand(match):
    images, texts, labels = embeddings()
    wanted = labels if match == 'label' else torch.arange(N)
    expected = {}
    for name, (queries, others) in dict(
        image_to_text=(images, texts), text_to_image=(texts, images)
    ).items():
        for k in (1, 3):
            right = 0
            for row, query in enumerate(queries):
                similar = F.cosine_similarity(others, query[None])
                nearest = sorted(range(N), key=lambda j: -similar[j].item())[:k]
                right += any(wanted[j] == wanted[row] for j in nearest)
            expected[f'{name}_r{k}'] = pytest.approx(100 * right / N)
    actual = evaluate(RetrievalMetric((1, 3), match, prefix='digits'), images, texts, labels)
    assert actual == {f'digits/{name}': value for name, value in expected.items()}


def test_recall_of_the_embeddings_themselves_is_whole():
    images, _, _ = embeddings()
    assert recall_at(images, images, torch.arange(N), 1) == 100.0
    assert recall_at(images, -images, torch.arange(N), 1) == 0.0


def test_samples_without_labels_make_no_figure():
    """They would be of one class, which every image finds."""
    images, texts, labels = embeddings()
    for metric in (ZeroShotMetric(), RetrievalMetric((1,), 'label')):
        with pytest.raises(ValueError, match='30 of 30 samples have no label'):
            evaluate(metric, images, texts, torch.full_like(labels, -1))
    evaluate(RetrievalMetric((1,), 'index'), images, texts, torch.full_like(labels, -1))


def test_what_is_no_number_makes_no_figure():
    images, texts, labels = embeddings()
    images[3, 1] = float('nan')
    for metric in (ZeroShotMetric(), RetrievalMetric((1,))):
        with pytest.raises(ValueError, match='the outputs of 1 of 30 samples are NaN'):
            evaluate(metric, images, texts, labels)


def metrics_of_rank(rank, world_size):
    images, texts, labels = embeddings()
    rows = [row % N for row in range(rank, N + world_size - 1, world_size)]  # padded like a sampler
    rows = rows[: -(-N // world_size)]
    found = {}
    for metric in (ZeroShotMetric(), RetrievalMetric((1,), 'label')):
        samples = [{'feature': images[r], 'text_feature': texts[r]} for r in rows]
        given = dict(label=labels[rows], index=torch.tensor(rows))
        metric.process(dict(data_samples=given), samples)
        found.update(metric.evaluate(N))
    return found


@pytest.mark.parametrize('ranks', [2, 4])
def test_ranks_agree_with_one_process(ranks):
    expected = metrics_of_rank(0, 1)
    assert run_ranks(ranks, metrics_of_rank) == [pytest.approx(expected)] * ranks


def test_what_does_not_fit_is_refused():
    given = dict(data_samples=dict(label=torch.tensor([0]), index=torch.tensor([0])))
    with pytest.raises(ValueError, match="ZeroShotMetric: the model returns no 'text_feature'"):
        ZeroShotMetric().process(given, [{'feature': torch.zeros(D)}])
    with pytest.raises(ValueError, match='topk'):
        RetrievalMetric(())
    with pytest.raises(ValueError, match='match must be'):
        RetrievalMetric(match='class')
    with pytest.raises(ValueError, match='exceeds 30 samples'):
        evaluate(RetrievalMetric((31,)), *embeddings())


@pytest.mark.parametrize('metric', [ZeroShotMetric, RetrievalMetric])
def test_what_stands_in_for_an_unreadable_image_counts_once(metric):
    images, texts, labels = embeddings()
    rows = torch.arange(N)
    rows[[3, 8, 9]] = torch.tensor([4, 10, 10])  # those before could not be read
    kept = rows.unique()
    expected = evaluate(metric(), images[kept], texts[kept], labels[kept])
    samples = [{'feature': images[row], 'text_feature': texts[row]} for row in rows]
    repeated = metric()
    repeated.process(dict(data_samples=dict(label=labels[rows], index=rows)), samples)
    assert repeated.evaluate(N) == expected
