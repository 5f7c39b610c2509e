"""Moments of a training in one plane: what is kept, and how it is drawn."""

import torch
from matplotlib.axes import Axes
from torch.nn import functional as F

from memengine.visualization.over_time import Moment, Moments, save_maps


def evaluation(size, width=4, labels=True, bank=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, width, generator=generator)
    samples = dict(index=torch.arange(size))
    if labels:
        samples['label'] = torch.arange(size) % 3
    if bank is not None:
        samples['bank'] = torch.arange(size) < bank
    return dict(data_samples=samples), [{'feature': feature} for feature in features], features


def test_samples_at_even_distances_that_are_held_out_and_finite(tmp_path):
    moments = Moments(tmp_path / 'new', step=3)
    batch, outputs, features = evaluation(30, bank=10)
    outputs[15]['feature'][1] = torch.inf
    moments.add(batch, outputs)
    moments.save(7)
    (moment,) = moments.read()
    assert moment.iteration == 7 and moment.places.tolist() == [12, 18, 21, 24, 27]
    assert moment.labels.tolist() == [0, 0, 0, 0, 0]
    expected = F.normalize(features[moment.places], dim=1)
    torch.testing.assert_close(moment.features, expected, atol=1e-3, rtol=0)


def test_what_has_no_feature_or_no_place_leaves_nothing(tmp_path):
    moments = Moments(tmp_path, step=1)
    batch, outputs, _ = evaluation(4)
    moments.add(batch, [{'logits': torch.ones(3)}] * 4)
    moments.add(dict(data_samples=dict(label=torch.ones(4))), outputs)
    moments.add([torch.ones(4, 3)], outputs)
    moments.add(batch, [])
    moments.save(1)
    assert moments.read() == [] and not [*tmp_path.iterdir()]


def test_few_files_stay_of_many_evaluations(tmp_path):
    moments = Moments(tmp_path, step=1)
    for iteration in range(200):
        moments.add(*evaluation(4)[:2])
        moments.save(iteration)
        assert len([*tmp_path.iterdir()]) <= 18
    drawn = [moment.iteration for moment in moments.read()]
    assert len(drawn) == 6 and drawn[0] == 0 and drawn[-1] == 199
    moments.clear()
    assert moments.read() == []


def drawn_points(monkeypatch, moments, path):
    """Where each panel's points lie, by its title, and what is labelled."""
    seen, labels = {}, []
    scatter, title = Axes.scatter, Axes.set_title

    def keep(axis, across, up, **options):
        seen.setdefault(axis, []).append(torch.tensor([across.tolist(), up.tolist()]).T)
        labels.append(options.get('label'))
        return scatter(axis, across, up, **options)

    titles = {}
    monkeypatch.setattr(Axes, 'scatter', keep)
    monkeypatch.setattr(
        Axes, 'set_title', lambda axis, text, **o: (titles.update({axis: text}), title(axis, text))
    )
    save_maps(moments, path, ['a', 'b'])
    return {titles[axis]: torch.cat(points) for axis, points in seen.items()}, labels


def test_one_plane_for_all_moments(tmp_path, undrawn, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(20, 2, generator=generator)
    plane, _ = torch.linalg.qr(torch.randn(6, 2, generator=generator))
    both = torch.zeros(20).long()
    moments = [
        Moment(0, flat @ plane.T + 5.0, both, torch.arange(20)),
        Moment(10, 3 * flat @ plane.T - 1.0, both, torch.arange(20)),
    ]
    points, labels = drawn_points(monkeypatch, moments, tmp_path / 'map.png')
    first, last = points['iteration 0'], points['iteration 10']
    torch.testing.assert_close(last, 3 * first, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.cdist(first, first), torch.cdist(flat, flat).double().float(), atol=1e-5, rtol=1e-5
    )
    assert labels == ['a', 'a']


def test_without_labels_in_one_colour(tmp_path, undrawn, monkeypatch):
    none = torch.full((5,), -1)
    moments = [Moment(3, torch.randn(5, 4), none, torch.arange(5))]
    points, labels = drawn_points(monkeypatch, moments, tmp_path / 'map.png')
    assert len(points['iteration 3']) == 5 and labels == [None]
