"""``memengine data``: pictures of the views, and which of data and model is slower."""

import re
import sys

import pytest
import torch
from PIL import Image

from memengine.engine.cli import data as data_command
from memengine.engine.cli.data import bottleneck
from memengine.engine.cli.main import main
from memengine.visualization.views import views_of
from tests.docs_pages import ROOT

QUICK = ['train_dataloader.batch_size=4', 'train_dataloader.dataset.indices=12']


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])

    def command(config, *options):
        status = main(['data', str(ROOT / config), '--cfg-options', *QUICK, *options])
        return status, capsys.readouterr()

    return command


def test_views_are_drawn_and_both_are_timed(run, tmp_path):
    status, said = run('configs/dino_vit_photographs.py')
    assert status == 0, said.err
    drawn, data, model, verdict = said.out.splitlines()[-4:]  # a warning of few classes first
    path = 'work_dirs/dino_vit_photographs/data/views.png'
    shapes = ', '.join(['3×32×32'] * 2 + ['3×16×16'] * 4)
    assert drawn == f'{path}: 4 samples, their views side by side ({shapes})'
    assert re.fullmatch(r'data: \d+ images/s in one process', data)
    assert re.fullmatch(r'model: \d+ images/s on cpu', model)
    assert re.match(r'the (data|model) is the bottleneck: 1 worker\(s\) load', verdict)
    with Image.open(tmp_path / path) as picture:
        assert picture.width / picture.height == pytest.approx(6 / 4)
        assert len(picture.convert('RGB').getcolors(10**6)) > 50


def test_images_of_all_iterations_of_a_step_are_counted(run, monkeypatch):
    """A step of several iterations counted as one: the model seemed half as fast."""
    monkeypatch.setattr(data_command, '_median_seconds', lambda do, times: 1.0)
    status, said = run('configs/dino_vit.py', 'optim_wrapper.accumulative_counts=4')
    assert status == 0, said.err
    assert 'data: 4 images/s in one process\nmodel: 8 images/s on cpu\n' in said.out


def test_data_of_one_batch_is_drawn_and_not_timed(run):
    status, said = run('configs/dino_vit.py', 'train_dataloader.dataset.indices=5')
    assert status == 0, said.err
    assert said.out.splitlines()[-1:] == ['the data has one batch only, too few to be timed']


def test_the_slower_one_is_named():
    data = bottleneck(100, 250, 2)
    assert data[0] == 'data: 100 images/s in one process'
    assert re.search('the data is the bottleneck: 2 .* 0.80 times.*num_workers=3', data[2])
    assert 'the model is the bottleneck: 3 worker(s) load 1.2 times' in bottleneck(100, 250, 3)[2]
    turns = bottleneck(100, 300, 0)[2]
    assert 'take turns' in turns and '75% of the time' in turns and 'num_workers=4' in turns


def test_what_has_no_pictures_is_left():
    assert views_of(dict(x=torch.ones(2, 3))) == []
    assert views_of(dict(inputs=torch.ones(2, 7))) == []
    assert views_of(dict(inputs=torch.ones(2, 5, 4, 4))) == []  # five channels
    assert views_of([torch.ones(2, 3, 4, 4)]) == []
    two = views_of(dict(inputs=[torch.ones(2, 3, 4, 4), torch.ones(2, 3, 2, 2)]))
    assert [[list(view.shape) for view in views] for views in two] == [[[3, 4, 4], [3, 2, 2]]] * 2
    unequal = views_of(dict(inputs=[torch.ones(3, 4, 4), torch.ones(3, 5, 6)]))
    assert [list(views[0].shape) for views in unequal] == [[3, 4, 4], [3, 5, 6]]
