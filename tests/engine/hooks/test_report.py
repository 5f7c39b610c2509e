"""The report that a run leaves, and that it never costs the training."""

import json
import logging

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from memengine.engine.hooks import ReportHook
from memengine.engine.hooks import report as module
from memengine.visualization import attention, features, over_time, views
from tests.engine.hooks.images import BANK, QUERIES, Classifier, Images, image_runner, loader

ALWAYS = {'index.html', 'memory.json', 'views.png', 'neighbours.png', 'embedding_map.png'}
MOMENTS = 'embedding_map'


class Wrapped(nn.Module):
    """As TimmBackbone holds its model."""

    def __init__(self):
        super().__init__()
        self.model = timm.create_model(
            'vit_tiny_patch16_224',
            img_size=8,
            patch_size=4,
            in_chans=1,
            embed_dim=16,
            depth=1,
            num_heads=2,
            num_classes=0,
        )

    def forward(self, images):
        return self.model(images)


class WithTeacher(Classifier):
    def __init__(self):
        super().__init__()
        self.backbone = Wrapped()
        self.head = nn.Linear(16, 3)
        self.teacher = nn.Module()
        self.teacher.backbone = Wrapped()


class Queried(Images):
    """As BankAndQueries: it has its queries apart."""

    queries = range(QUERIES)


@pytest.fixture
def drawn(monkeypatch):
    """What the attention figure was made of."""
    seen = []
    maps_of, save = attention.attention_maps, attention.save_attention_figure

    def maps(backbone, images):
        seen.append(backbone)
        return maps_of(backbone, images)

    def figure(images, maps, path):
        seen.extend([images, maps])
        save(images, maps, path)

    monkeypatch.setattr(attention, 'attention_maps', maps)
    monkeypatch.setattr(attention, 'save_attention_figure', figure)
    return seen


def messages_of(runner, level):
    class Catch(logging.Handler):
        def emit(self, record):
            if record.levelno == level:
                seen.append(record.getMessage())

    seen = []
    runner.logger.handlers.append(Catch())
    return seen


def test_curves_and_attention_of_the_teacher_on_queries(tmp_path, drawn):
    runner = image_runner(
        tmp_path,
        dict(type='ReportHook', num_images=4),
        model=WithTeacher(),
        epochs=1,
        val_dataloader=loader(Queried()),
    )
    runner.train()
    names = {path.name for path in (tmp_path / 'report').iterdir()}
    assert names == {*ALWAYS, MOMENTS, 'curves.png', 'summary.json', 'attention.png'}
    backbone, images, maps = drawn
    assert backbone is runner.model.teacher.backbone.model
    assert maps.shape == (4, 2, 2, 2)
    places = [BANK, BANK + 8, BANK + 15, BANK + QUERIES - 1]
    assert torch.equal(images.cpu(), Images().images[places])
    with Image.open(tmp_path / 'report' / 'attention.png') as picture:
        assert picture.height > picture.width * 3 / 4 * 0.9  # four rows of image, mean, two heads


def test_the_backbone_where_there_is_no_teacher_and_images_of_all_data(tmp_path, undrawn, drawn):
    model = WithTeacher()
    del model.teacher
    image_runner(tmp_path, dict(type='ReportHook', num_images=2), model=model, epochs=1).train()
    backbone, images, _ = drawn
    assert backbone is model.backbone.model
    assert torch.equal(images.cpu(), Images().images[[0, BANK + QUERIES - 1]])


def test_without_attention_the_log_says_so(tmp_path, undrawn):
    runner = image_runner(tmp_path, dict(type='ReportHook'), epochs=1)
    told, errors = messages_of(runner, logging.INFO), messages_of(runner, logging.ERROR)
    runner.train()
    assert [text for text in told if 'no attention maps' in text and 'Sequential' in text]
    assert not errors
    names = {path.name for path in (tmp_path / 'report').iterdir()}
    assert names == {*ALWAYS, MOMENTS, 'curves.png', 'summary.json'}


def test_a_run_that_logs_nothing_has_no_curves(tmp_path, undrawn):
    options = dict(default_hooks=dict(logger=None))
    runner = image_runner(tmp_path, dict(type='ReportHook'), epochs=1, **options)
    told, errors = messages_of(runner, logging.INFO), messages_of(runner, logging.ERROR)
    runner.train()
    assert [text for text in told if 'no curves' in text and 'logger.interval' in text]
    assert not errors and not (tmp_path / 'report' / 'curves.png').exists()


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        (dict(val_dataloader=None, val_cfg=None, val_evaluator=None), 'config has no validation'),
        (dict(model=None), 'model has no backbone'),
    ],
)
def test_without_images_or_backbone_the_log_says_so(tmp_path, undrawn, options, reason):
    if 'model' in options:
        options['model'] = Classifier()
        options['model'].feature, options['model'].backbone = options['model'].backbone, None

        def forward(inputs, data_samples=None, mode='tensor'):
            features = options['model'].feature(inputs)
            if mode == 'predict':
                return [{'feature': row} for row in features]
            return {'loss': options['model'].head(features).square().mean()}

        options['model'].forward = forward
    runner = image_runner(tmp_path, dict(type='ReportHook'), epochs=1, **options)
    told = messages_of(runner, logging.INFO)
    runner.train()
    assert [text for text in told if reason in text]
    assert (tmp_path / 'report' / 'curves.png').exists()


def test_the_page_says_where_memory_went(tmp_path):
    runner = image_runner(
        tmp_path, dict(type='ReportHook', num_images=1), model=WithTeacher(), epochs=1
    )
    runner.train()
    held = json.loads((tmp_path / 'report' / 'memory.json').read_text())
    assert held['weights'] == sum(p.nbytes for p in runner.model.parameters())
    page = (tmp_path / 'report' / 'index.html').read_text()
    assert 'Where memory went' in page and '<td>weights</td>' in page
    assert page.count('data:image/png;base64,') == 4, 'attention, views, map, neighbours'


@pytest.mark.parametrize('broken', ['attention_maps', 'write_report'])
def test_a_failure_is_logged_and_nothing_else_is_lost(tmp_path, undrawn, monkeypatch, broken):
    from memengine.visualization import report as curves

    def fail(*args):
        raise ZeroDivisionError('no ink')

    monkeypatch.setattr(attention if broken == 'attention_maps' else curves, broken, fail)
    runner = image_runner(tmp_path, dict(type='ReportHook'), model=WithTeacher(), epochs=1)
    errors = messages_of(runner, logging.ERROR)
    runner.train()
    (error,) = errors
    assert 'no ink' in error
    assert (tmp_path / 'epoch_1.pth').exists()
    other = 'curves.png' if broken == 'attention_maps' else 'attention.png'
    assert (tmp_path / 'report' / other).exists()
    assert 'ZeroDivisionError' in next(tmp_path.glob('*/*.log')).read_text()  # with its traceback


def test_other_ranks_draw_nothing(tmp_path, monkeypatch):
    runner = image_runner(tmp_path, dict(type='ReportHook'), model=WithTeacher(), epochs=1)
    monkeypatch.setattr(runner, '_rank', 1)
    runner.train()
    assert not (tmp_path / 'report').exists()


def test_no_images_are_asked_for(tmp_path, drawn):
    hook = dict(type='ReportHook', num_images=0)
    image_runner(tmp_path, hook, model=WithTeacher(), epochs=1).train()
    assert drawn == []
    names = {path.name for path in (tmp_path / 'report').glob('*.png')}
    assert names == {'curves.png', 'embedding_map.png'}
    with pytest.raises(ValueError, match='num_images must not be negative'):
        ReportHook(num_images=-1)
    with pytest.raises(ValueError, match='map_points must not be negative'):
        ReportHook(map_points=-1)
    assert module.ReportHook is ReportHook


class Normalised(Classifier):
    """With running statistics, which a forward pass in training mode would move."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.backbone.append(nn.BatchNorm1d(6))


def moments_of(work_dir):
    found = {}
    for path in sorted((work_dir / 'report' / MOMENTS).glob('*.npz')):
        with np.load(path) as held:
            found[int(path.stem)] = dict(held)
    return found


def test_the_map_is_of_held_out_samples_at_each_evaluation(tmp_path, undrawn, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        over_time, 'save_maps', lambda moments, path, names: seen.update(moments=moments)
    )
    hooks = (dict(type='ReportHook', map_points=12), dict(type='EvaluateFirstHook'))
    runner = image_runner(tmp_path, *hooks, model=Normalised(), val_dataloader=loader(Queried()))
    runner.train()
    first, _, last = seen['moments']
    assert [moment.iteration for moment in seen['moments']] == [0, 6, 12]
    places = torch.arange(BANK, BANK + QUERIES, 2)  # 12 of the 24 queries
    assert torch.equal(last.places, places) and torch.equal(first.places, places)
    assert torch.equal(last.labels, Images().labels[places])
    with torch.no_grad():
        expected = runner.model.backbone.eval()(Images().images[places])
    expected = nn.functional.normalize(expected, dim=1)
    torch.testing.assert_close(last.features, expected, atol=1e-3, rtol=0)
    assert (first.features - last.features).abs().max() > 0.1


def test_training_is_the_same_with_and_without_the_map(tmp_path, undrawn):
    states = []
    for name, hooks in (('plain', ()), ('map', (dict(type='ReportHook'),))):
        runner = image_runner(tmp_path / name, *hooks, model=Normalised())
        runner.train()
        states.append(runner.model.state_dict())
    assert moments_of(tmp_path / 'map').keys() == {6, 12}
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_run_that_is_gone_on_with_has_all_moments_and_a_new_one_its_own(tmp_path, undrawn):
    hook = dict(type='ReportHook')
    image_runner(tmp_path / 'whole', hook, model=Normalised()).train()
    whole = moments_of(tmp_path / 'whole')
    image_runner(tmp_path / 'parts', hook, model=Normalised(), epochs=1).train()
    resumed = image_runner(tmp_path / 'parts', hook, model=Normalised(), resume=True)
    resumed.train()
    parts = moments_of(tmp_path / 'parts')
    assert [*parts] == [*whole] == [6, 12]
    for moment in whole:
        assert all((whole[moment][key] == parts[moment][key]).all() for key in whole[moment])
    image_runner(tmp_path / 'whole', hook, model=Normalised(), epochs=1).train()
    assert [*moments_of(tmp_path / 'whole')] == [6]


def test_a_disk_that_is_full_costs_the_map_only(tmp_path, undrawn, monkeypatch):
    def full(*args, **kwargs):
        raise OSError('No space left on device')

    monkeypatch.setattr(np, 'savez', full)
    runner = image_runner(tmp_path, dict(type='ReportHook'), epochs=1)
    errors, told = messages_of(runner, logging.ERROR), messages_of(runner, logging.INFO)
    runner.train()
    assert len(errors) == 1 and 'No space left' in errors[0]
    assert [text for text in told if 'no map of embeddings' in text]
    assert (tmp_path / 'epoch_1.pth').exists()


def test_neighbours_and_views_are_those_of_the_samples(tmp_path, monkeypatch, undrawn):
    seen = {}
    monkeypatch.setattr(features, 'save_neighbours', lambda *drawn: seen.update(near=drawn))
    monkeypatch.setattr(views, 'save_views', lambda samples, path: seen.update(views=samples))
    hook = dict(type='ReportHook', num_images=3)
    image_runner(tmp_path, hook, epochs=1, val_dataloader=loader(Queried())).train()
    images, neighbours, _, names, others = seen['near']
    held_out = Images().images[BANK:]
    assert torch.equal(images, held_out[[0, 12, 23]]) and neighbours.shape[:2] == (3, 5)
    assert names == [str(int(Images().labels[BANK + row])) for row in (0, 12, 23)]
    assert [len(row) for row in others] == [5, 5, 5]
    assert torch.equal(
        torch.cat([sample[0] for sample in seen['views']]).cpu(), Images().images[[0, 24, 47], 0]
    )
