"""The history of a work dir from the logs of its runs."""

import json
import math

import pytest

from memengine.visualization.scalars import read_history


def write_run(work_dir, name, lines):
    folder = work_dir / name / 'vis_data'
    folder.mkdir(parents=True)
    (folder / 'scalars.json').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return folder / 'scalars.json'


def train(iteration, loss, per_epoch=20, **more):
    epoch = math.ceil(iteration / per_epoch)
    return {'loss': loss, 'time': 0.5, 'epoch': epoch, 'iter': iteration, 'step': iteration, **more}


def val(step, knn):
    return {'knn_top1': knn, 'time': 0.1, 'step': step}


def points(curve):
    return list(zip(curve.iters, curve.values, strict=True))


def test_one_run(tmp_path):
    lines = [val(0, 30.0), train(10, 5.0), train(20, 4.0), val(1, 60.0), train(30, 3.0)]
    write_run(tmp_path, '20260101_000000', lines)
    history = read_history(tmp_path)
    assert points(history.train['loss']) == [(10, 5.0), (20, 4.0), (30, 3.0)]
    assert points(history.val['knn_top1']) == [(0, 30.0), (20, 60.0)]
    assert history.epochs == 2
    assert history.total_s('time') == pytest.approx(15.0)
    assert history.runs == ['20260101_000000']
    assert not {'iter', 'epoch', 'step'} & {*history.train, *history.val}


def test_validation_by_epoch_lies_at_the_end_of_its_epoch(tmp_path):
    """19 iterations an epoch, logged every 10 of each epoch: never at its end."""
    lines = []
    for epoch in range(1, 31):
        lines += [train(19 * (epoch - 1) + 10, 1.0, per_epoch=19), val(epoch, 1.0)]
    write_run(tmp_path, '20260101_000000', lines)
    iters = read_history(tmp_path).val['knn_top1'].iters
    assert iters == [19 * epoch for epoch in range(1, 31)]


def test_validation_by_iteration_lies_at_its_step(tmp_path):
    lines = [val(0, 1.0), train(10, 5.0), val(15, 2.0), train(20, 4.0), val(20, 3.0)]
    for line in lines:
        line.pop('epoch', None)  # as a loop over iterations logs it
    write_run(tmp_path, '20260101_000000', lines)
    assert points(read_history(tmp_path).val['knn_top1']) == [(0, 1.0), (15, 2.0), (20, 3.0)]


def test_a_resumed_run_goes_on_and_wins_where_both_are(tmp_path):
    first = [val(0, 30.0), train(10, 5.0), train(20, 4.0), val(1, 50.0), train(30, 99.0)]
    write_run(tmp_path, '20260101_000000', [*first, train(40, 99.0), val(2, 99.0)])
    write_run(tmp_path, '20260102_000000', [train(30, 3.0), train(40, 2.0), val(2, 70.0)])
    history = read_history(tmp_path)
    assert points(history.train['loss']) == [(10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)]
    assert points(history.val['knn_top1']) == [(0, 30.0), (20, 50.0), (40, 70.0)]
    assert history.total_s('time') == pytest.approx(20.0)
    assert history.runs == ['20260101_000000', '20260102_000000']


@pytest.mark.parametrize('evaluated_first', [True, False])
def test_a_run_from_the_start_replaces_what_was_there(tmp_path, evaluated_first):
    write_run(tmp_path, '20260101_000000', [val(0, 30.0), train(10, 5.0), train(20, 4.0)])
    again = [val(0, 31.0)] if evaluated_first else []
    write_run(tmp_path, '20260102_000000', [*again, train(10, 6.0)])
    history = read_history(tmp_path)
    assert points(history.train['loss']) == [(10, 6.0)]
    assert ('knn_top1' in history.val) is evaluated_first
    assert history.runs == ['20260102_000000']


def test_a_validation_alone_changes_nothing(tmp_path):
    write_run(tmp_path, '20260101_000000', [val(0, 30.0), train(10, 5.0), val(1, 50.0)])
    write_run(tmp_path, '20260102_000000', [val(0, 99.0)])
    history = read_history(tmp_path)
    assert history.val['knn_top1'].values == [30.0, 50.0]
    assert history.train['loss'].values == [5.0]


def test_names_with_their_stage_and_values_that_are_no_numbers(tmp_path):
    line = {'train/loss': math.nan, 'train/note': 'text', 'iter': 10, 'epoch': 1, 'step': 10}
    write_run(tmp_path, '20260101_000000', [line, {'val/knn_top1': 5.0, 'step': 1}])
    history = read_history(tmp_path)
    assert math.isnan(history.train['loss'].values[0])
    assert 'note' not in history.train
    assert history.val['knn_top1'].values == [5.0]
    assert history.total_s('time') is None


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = write_run(tmp_path, '20260101_000000', [train(10, 5.0)])
    path.write_text(path.read_text() + '{"loss": 4.')
    assert read_history(tmp_path).train['loss'].values == [5.0]


def test_a_damaged_log_is_an_error_that_names_the_line(tmp_path):
    path = write_run(tmp_path, '20260101_000000', [train(10, 5.0), train(20, 4.0)])
    path.write_text('nonsense\n' + path.read_text())
    with pytest.raises(ValueError, match=r'scalars\.json, line 1: not a JSON object.*nonsense'):
        read_history(tmp_path)


def test_nothing_logged(tmp_path):
    with pytest.raises(FileNotFoundError, match='no run there has logged training'):
        read_history(tmp_path)
    write_run(tmp_path, '20260101_000000', [val(0, 30.0)])
    with pytest.raises(FileNotFoundError, match='no run there has logged training'):
        read_history(tmp_path)
