"""Slices: every row once, embedded as in the whole batch; losses of slices add up."""

import pytest
import torch

from memengine.models import CLIP, Classifier, SelfCon, SimCLR
from memengine.models.algorithms.base import Algorithm
from memengine.techniques.slices.slicing import cut_evenly, slice_views
from memengine.testing import assert_same_step
from tests.models.toy import SETTINGS, B, batch, build


@pytest.mark.parametrize('size', [1, 3, 4, 100])
@pytest.mark.parametrize('kind', SETTINGS, ids=lambda kind: kind.__name__)
def test_slices_hold_every_row_once_and_are_embedded_as_in_the_batch(kind, size):
    model, (inputs, samples) = build(kind), batch(kind)
    slices = model.slices(inputs, samples, size)
    for tower in {piece.tower for piece in slices}:
        own = [piece for piece in slices if piece.tower == tower]
        rows = [row for piece in own for row in piece.rows]
        assert rows == list(range(own[0].total))
        assert max(len(piece.rows) for piece in own) <= size
        assert max(len(p.rows) for p in own) - min(len(p.rows) for p in own) <= 1
    whole = model(inputs, samples)
    joined = model.join([model(piece.inputs, piece.data_samples) for piece in slices])
    if not isinstance(whole, dict):
        whole, joined = {'z': whole}, {'z': joined}
    assert whole.keys() == joined.keys()
    for name, expected in whole.items():
        assert joined[name].shape == expected.shape
        assert torch.allclose(joined[name], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize('size', [1, 2, 100])
def test_losses_of_slices_add_up(size):
    model, (images, samples) = build(Classifier, label_smoothing=0.1), batch(Classifier)
    targets = model.targets(images, samples)
    whole = model(images, samples, mode='loss')
    parts = [
        model.slice_loss(model(piece.inputs, piece.data_samples), targets, piece)
        for piece in model.slices(images, samples, size)
    ]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert_same_step(model.batch_losses(sums, targets), whole)


def test_a_slice_holds_the_data_samples_of_its_rows():
    inputs = [torch.arange(3.0), torch.arange(3.0) + 10]
    samples = dict(label=torch.arange(3), caption=['a', 'b', 'c'], nothing=None)
    first, second = slice_views(inputs, samples, 4)  # 6 rows: 3 and 3
    assert [part.tolist() for part in first.inputs] == [[0, 1, 2]]
    assert [part.tolist() for part in second.inputs] == [[10, 11, 12]]
    _, middle, _ = slice_views(inputs, samples, 2)
    assert [part.tolist() for part in middle.inputs] == [[2], [10]]
    assert middle.data_samples['label'].tolist() == [2, 0]
    assert middle.data_samples['caption'] == ['c', 'a']
    assert middle.data_samples['nothing'] is None
    alone = slice_views(inputs[0], None, 2)
    assert [piece.inputs.tolist() for piece in alone] == [[0], [1, 2]]
    assert alone[0].data_samples is None


def test_slices_copy_nothing():
    inputs, samples = batch(SimCLR)
    pointers = {view.untyped_storage().data_ptr() for view in inputs}
    for piece in build(SimCLR).slices(inputs, samples, 3):
        assert all(part.untyped_storage().data_ptr() in pointers for part in piece.inputs)


@pytest.mark.parametrize('size', [0, -1, 1.5, True, '2', None])
@pytest.mark.parametrize('kind', SETTINGS, ids=lambda kind: kind.__name__)
def test_sizes_below_one_and_no_numbers_are_refused(kind, size):
    with pytest.raises(ValueError, match='at least 1'):
        build(kind).slices(*batch(kind), size)


def test_sizes_by_tower():
    model = build(CLIP)
    slices = model.slices(*batch(CLIP), dict(image=2, text=B))
    assert [piece.tower for piece in slices] == ['image'] * 3 + ['text']
    with pytest.raises(ValueError, match='one for each of'):
        model.slices(*batch(CLIP), dict(image=2))


@pytest.mark.parametrize(
    ('method', 'arguments'),
    [('embed', 1), ('embedding_loss', 2), ('features', 1), ('slice_loss', 3)],
)
def test_what_an_algorithm_lacks_is_named(method, arguments):
    with pytest.raises(NotImplementedError, match=rf'Algorithm does not define {method}\(\)'):
        getattr(Algorithm(), method)(*[None] * arguments)


def test_views_of_several_sizes_are_refused():
    small = torch.zeros(B, 1, 4, 4)
    with pytest.raises(ValueError, match='several sizes'):
        build(SelfCon).slices([torch.zeros(B, 1, 8, 8), small], None, 2)
    with pytest.raises(TypeError, match='define slices'):
        Algorithm().slices({'image': small}, None, 2)
    with pytest.raises(ValueError, match='empty'):
        cut_evenly(0, 2)
