"""The k-NN metric: sharded over ranks, with its two yardsticks."""

import logging

import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.logging import MessageHub, MMLogger

from memengine.evaluation import KNNMetric, weighted_knn
from memengine.registry import METRICS
from memengine.testing import run_ranks


def dataset(bank=70, queries=37, classes=4):
    """Images [N, 1, 4, 4] of overlapping classes; the features are a random projection."""
    generator = torch.Generator().manual_seed(0)
    count = bank + queries
    labels = torch.randint(classes, (count,), generator=generator)
    centres = torch.randn(classes, 16, generator=generator)
    pixels = centres[labels] + 1.7 * torch.randn(count, 16, generator=generator)
    return {
        'inputs': pixels.view(-1, 1, 4, 4),
        'label': labels,
        'index': torch.arange(count),
        'bank': torch.arange(count) < bank,
        'feature': pixels @ torch.randn(16, 5, generator=generator),
    }


def batches(data, order, size=10):
    """What the evaluator is handed: (batch, predictions)."""
    for rows in torch.tensor(list(order), dtype=torch.long).split(size) if len(order) else ():
        batch = {
            'inputs': data['inputs'][rows],
            'data_samples': {name: data[name][rows] for name in ('label', 'index', 'bank')},
        }
        yield batch, [{'feature': row} for row in data['feature'][rows]]


def run_metric(data, order, **settings):
    evaluator = Evaluator(KNNMetric(**settings))
    for batch, predictions in batches(data, order):
        evaluator.process(predictions, batch)
    return evaluator.evaluate(len(data['label']))


def expected(data, name='feature', k=20):
    features, bank = data[name].flatten(1), data['bank']
    predicted = weighted_knn(features[~bank], features[bank], data['label'][bank], k)
    return 100 * (predicted == data['label'][~bank]).double().mean().item()


@pytest.fixture(autouse=True)
def no_runner():
    """No training in progress, unless the test says so."""
    MessageHub.get_instance('knn_metric_test')
    yield
    MessageHub._instance_dict.pop('knn_metric_test')


def test_percentages_of_features_and_pixels():
    data = dataset()
    metrics = run_metric(data, range(107))
    assert metrics == {
        'knn_top1': pytest.approx(expected(data)),
        'knn_top1_raw_pixels': pytest.approx(expected(data, 'inputs')),
    }
    assert 30 < metrics['knn_top1'] < metrics['knn_top1_raw_pixels'] < 100


def test_order_of_the_samples_does_not_matter():
    data = dataset()
    order = torch.randperm(107, generator=torch.Generator().manual_seed(1))
    assert run_metric(data, order) == run_metric(data, range(107))


def test_built_from_a_config_with_a_prefix_and_without_pixels():
    data = dataset()
    metric = METRICS.build(dict(type='KNNMetric', k=3, raw_pixels=False, prefix='three'))
    for batch, predictions in batches(data, range(107)):
        metric.process(batch, predictions)
    assert metric.evaluate(107) == {'three/knn_top1': pytest.approx(expected(data, k=3))}


def test_repeated_samples_count_once():
    """A padded sampler repeats the first samples: as neighbours they would get two votes."""
    data = dataset()
    once = run_metric(data, range(107), k=7)
    assert run_metric(data, [*range(107), *range(0, 107, 2)], k=7) == once


def test_results_are_forgotten_also_after_an_error():
    data = dataset()
    metric = KNNMetric(k=71)
    for _ in range(2):
        for batch, predictions in batches(data, range(107)):
            metric.process(batch, predictions)
        with pytest.raises(ValueError, match=r'k=71.*70 samples'):
            metric.evaluate(107)
        assert metric.results == []


def test_thumbnails_instead_of_whole_images():
    data = dataset()
    small = data['inputs'].view(-1, 2, 2, 2, 2).mean(dim=(2, 4))
    metrics = run_metric(data, range(107), raw_pixels=2)
    assert metrics['knn_top1_raw_pixels'] == pytest.approx(
        expected({**data, 'small': small}, 'small')
    )


def test_too_many_pixels_are_refused(monkeypatch):
    monkeypatch.setattr('memengine.evaluation.knn_metric._PIXEL_LIMIT_BYTES', 50 * 16 * 4)
    with pytest.raises(ValueError, match='raw_pixels=True.*raw_pixels=False'):
        run_metric(dataset(), range(107))
    assert 'knn_top1' in run_metric(dataset(), range(107), raw_pixels=1)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_features_that_are_no_numbers(value):
    data = dataset()
    data['feature'][[33, 90], 2] = value
    with pytest.raises(ValueError, match='features of 2 samples are NaN or inf.*index 33'):
        run_metric(data, range(107))


def test_samples_without_what_is_needed():
    batch, predictions = next(batches(dataset(), range(5)))
    del batch['data_samples']['bank']
    with pytest.raises(ValueError, match='data_samples lacks bank.*BankAndQueries'):
        KNNMetric().process(batch, predictions)


def test_several_views_have_no_pixels():
    batch, predictions = next(batches(dataset(), range(5)))
    batch['inputs'] = [batch['inputs']] * 2
    with pytest.raises(ValueError, match='raw_pixels=False'):
        KNNMetric().process(batch, predictions)
    KNNMetric(raw_pixels=False).process(batch, predictions)


def test_index_shared_by_bank_and_queries():
    data = dataset()
    data['index'] = torch.cat([torch.arange(70), torch.arange(37)])
    with pytest.raises(ValueError, match='index 0 is in the bank and among the queries'):
        run_metric(data, range(107))


def test_no_queries_and_no_samples():
    data = dataset()
    with pytest.raises(ValueError, match='no queries'):
        run_metric(data, range(70))
    with pytest.raises(ValueError, match='no samples'):
        KNNMetric().evaluate(0)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [(dict(k=0), 'k must be positive'), (dict(raw_pixels=-1), 'raw_pixels must be')],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        KNNMetric(**settings)


# ------------------------------------------------------------------ what is remembered


def hub_of_training(before_training):
    hub = MessageHub.get_current_instance()
    hub.update_info('loop_stage', 'val')
    hub.update_info('before_training', before_training)
    return hub


def test_the_evaluation_before_training_is_remembered(monkeypatch):
    lines = []
    monkeypatch.setattr(MMLogger.get_current_instance(), 'log', lambda _, text: lines.append(text))
    data = dataset()
    hub = hub_of_training(before_training=True)
    first = run_metric(data, range(107))
    assert first['knn_top1_untrained'] == first['knn_top1']
    hub.update_info('before_training', False)
    trained = {**data, 'feature': data['inputs'].flatten(1)}
    second = run_metric(trained, range(107))
    assert second['knn_top1_untrained'] == first['knn_top1']
    assert second['knn_top1'] == pytest.approx(expected(data, 'inputs')) != first['knn_top1']
    assert lines[
        -1
    ] == '20-NN top-1: raw pixels {:.1f} % | untrained {:.1f} % | now {:.1f} %'.format(
        second['knn_top1_raw_pixels'], first['knn_top1'], second['knn_top1']
    )


def test_pixels_are_kept_and_compared_once():
    data = dataset()
    hub_of_training(before_training=False)
    first = run_metric(data, range(107))
    blind = {**data, 'inputs': torch.zeros_like(data['inputs'])}
    metric = KNNMetric()
    for batch, predictions in batches(blind, range(107)):
        metric.process(batch, predictions)
    assert all(kept.pixels is None for kept in metric.results)
    assert metric.evaluate(107)['knn_top1_raw_pixels'] == first['knn_top1_raw_pixels']
    # another stage may have other data, and other settings another result
    MessageHub.get_current_instance().update_info('loop_stage', 'test')
    assert run_metric(blind, range(107))['knn_top1_raw_pixels'] < first['knn_top1_raw_pixels']


def test_memory_goes_through_a_checkpoint(tmp_path):
    data = dataset()
    hub = hub_of_training(before_training=True)
    first = run_metric(data, range(107))
    hub.update_info('before_training', False)
    torch.save(hub.state_dict()['runtime_info'], tmp_path / 'hub.pth')
    resumed = MessageHub.get_instance('knn_metric_test_resumed')
    try:
        info = torch.load(tmp_path / 'hub.pth', weights_only=True)
        for name, value in info.items():
            resumed.update_info(name, value)
        data['inputs'] = torch.zeros_like(data['inputs'])
        again = run_metric(data, range(107))
    finally:
        MessageHub._instance_dict.pop('knn_metric_test_resumed')
    assert again == first


# ------------------------------------------------------------------ several ranks


def _sharded(rank, world_size, chunk_size):
    """Uneven shards, a padded repeat on the last rank, and (of 4) one rank without a bank."""
    logging.disable()
    data = dataset()
    if world_size == 1:
        order = list(range(107))
    else:
        cuts = torch.linspace(0, 107, world_size + 1).long().tolist()
        cuts[1] = 5
        order = list(range(cuts[rank], cuts[rank + 1]))
        order += [0, 1, 80] if rank == world_size - 1 else []
    seen = []
    import memengine.evaluation.knn_metric as module

    plain = module.nearest

    def spy(query, bank, *args):
        seen.append((len(query), len(bank)))
        return plain(query, bank, *args)

    module.nearest = spy
    metrics = run_metric(data, order, chunk_size=chunk_size)
    return metrics, seen


@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_gives_the_same(world_size):
    data = dataset()
    alone = run_metric(data, range(107))
    results = run_ranks(world_size, _sharded, 8)
    for metrics, seen in results:
        assert metrics == alone
        assert max(queries for queries, _ in seen) <= 8  # of all ranks together
    banks = [max(bank for _, bank in seen) for _, seen in results]
    assert sum(banks) == 70 and max(banks) < 70  # nobody holds another's


def _diverged(rank, world_size):
    logging.disable()
    data = dataset()
    if rank == 1:
        data['feature'][60] = float('nan')
    order = range(0, 50) if rank == 0 else range(50, 107)
    try:
        run_metric(data, order)
    except ValueError as error:
        return str(error)


def _empty_rank(rank, world_size):
    logging.disable()
    return run_metric(dataset(), range(107) if rank == 1 else [])


def test_an_error_on_one_rank_is_raised_on_all():
    first, second = run_ranks(2, _diverged)
    assert first == second
    assert 'features of 1 samples are NaN' in first and 'index 60' in first


def test_a_rank_without_samples():
    assert run_ranks(2, _empty_rank) == [run_metric(dataset(), range(107))] * 2


def test_images_without_a_label_are_refused():
    data = dataset()
    data['label'][~data['bank']] = -1
    with pytest.raises(ValueError, match=r'KNNMetric: .* images have no label \(-1\)'):
        run_metric(data, range(107))
