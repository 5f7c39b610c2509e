"""Pictures of features: what is drawn, of what."""

import sys
from types import SimpleNamespace

import pytest
import timm
import torch

from memengine.engine.cli.main import main
from memengine.evaluation.after_training import look
from memengine.registry import LOOPS
from memengine.visualization import features as drawing
from tests.evaluation.after_training.test_commands import FEW, trained  # noqa: F401


def test_principal_components_of_a_line_and_noise():
    generator = torch.Generator().manual_seed(0)
    along = torch.linspace(-5, 5, 101, dtype=torch.float64)
    direction = torch.tensor([0.6, -0.8, 0.0], dtype=torch.float64)
    points = 3 + along[:, None] * direction
    found, shares = drawing.principal_components(points, 2)
    torch.testing.assert_close(found[:, 0], -along)  # -0.8 is the largest entry
    assert shares[0] == pytest.approx(1.0) and found[:, 1].abs().max() < 1e-9
    noise = torch.randn(200, 5, generator=generator)
    found, shares = drawing.principal_components(noise, 5)
    singular = torch.linalg.svdvals(noise.double() - noise.double().mean(0)).square()
    torch.testing.assert_close(shares, singular / singular.sum())
    torch.testing.assert_close(found.square().sum(0), singular)


def test_patches_of_one_kind_have_one_colour():
    features = torch.zeros(2, 5, 4, 4)
    features[:, 0, :, 2:] = 1.0  # the right half of each image
    features += 1e-3 * torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
    colours = drawing.patch_colours(features)
    assert colours.shape == (2, 4, 4, 3) and colours.min() >= 0 and colours.max() <= 1
    assert colours[:, :, 2:, 0].min() > 0.9 and colours[:, :, :2, 0].max() < 0.1


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'resnet18'])
def test_dense_features_of_networks(name):
    options = dict(img_size=32, embed_dim=16, depth=1, num_heads=2) if 'vit' in name else {}
    network = timm.create_model(name, num_classes=0, **options).train()
    features = drawing.dense_features(network, torch.randn(2, 3, 32, 32))
    assert features.shape[0] == 2 and features.ndim == 4 and network.training
    assert drawing.dense_features(torch.nn.Flatten(), torch.randn(2, 3, 4, 4)) is None


def test_classes_without_a_name_and_samples_without_a_class():
    assert drawing.class_words(torch.tensor([-1, 0, 5]), ['cat']) == ['', 'cat', '5']


def test_all_pictures_are_drawn_and_in_the_page(trained, monkeypatch, capsys):  # noqa: F811
    seen, draw = {}, drawing.save_neighbours

    def save(images, neighbours, path, names, others):
        seen.update(images=images, neighbours=neighbours, names=names, others=others)
        draw(images, neighbours, path, names, others)

    monkeypatch.setattr(drawing, 'save_neighbours', save)
    few = ['look.images=3', 'look.neighbours=4', 'experiment_name=look']
    assert main(['look', str(trained / 'epoch_1.pth'), *FEW, *few]) == 0, capsys.readouterr().err
    folder = trained / 'report' / 'look'
    assert {path.name for path in folder.glob('*.png')} == {
        f'{name}.png' for name in ('neighbours', 'map', 'attention', 'patches')
    }
    assert len(seen['images']) == 3 and seen['neighbours'].shape[:2] == (3, 4)
    assert len(seen['names']) == 3 and all(len(row) == 4 for row in seen['others'])
    assert (trained / 'report' / 'index.html').read_text().count('data:image/png') >= 4


def loop(**options):
    runner = SimpleNamespace(world_size=1, work_dir='nowhere')
    return LOOPS.build(dict(type='LookLoop', runner=runner, _scope_='memengine', **options))


def neighbours_of(monkeypatch, tmp_path, found):
    """Which rows are shown, and their neighbours."""
    rows = []

    def images(runner, wanted):
        rows.extend(wanted)
        return torch.zeros(len(wanted), 1, 2, 2)

    monkeypatch.setattr(look, 'images_of', images)
    monkeypatch.setattr(drawing, 'save_neighbours', lambda *things: None)
    monkeypatch.setattr(look, 'dataset_of', lambda runner: object())
    loop(images=2, neighbours=2)._draw_neighbours(found, tmp_path / 'x.png')
    return rows[:2], torch.tensor(rows[2:]).view(2, -1).tolist()


def test_neighbours_are_others_and_of_the_bank(monkeypatch, tmp_path):
    angles = torch.tensor([0.0, 0.1, 0.3, 1.5, 1.6, 1.8])
    found = {'feature': torch.stack([angles.cos(), angles.sin()], dim=1)}
    assert neighbours_of(monkeypatch, tmp_path, found) == ([0, 5], [[1, 2], [4, 3]])
    found['bank'] = torch.tensor([0, 0, 1, 1, 1, 1]).bool()
    assert neighbours_of(monkeypatch, tmp_path, found) == ([0, 1], [[2, 3], [2, 3]])


def test_a_map_by_umap(monkeypatch):
    class Umap:
        def __init__(self, **options):
            assert options == dict(metric='cosine', random_state=0)

        def fit_transform(self, features):
            return features[:, :2]

    monkeypatch.setitem(sys.modules, 'umap', SimpleNamespace(UMAP=Umap))
    points, title = look._MAPS['umap'](torch.eye(3))
    assert title == 'UMAP' and torch.equal(points, torch.eye(3)[:, :2])
    monkeypatch.setattr(look.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match='pip install umap-learn'):
        loop(map='umap')


@pytest.mark.parametrize(
    ('options', 'says'),
    [
        (dict(pictures=['faces']), 'look.pictures must be a list of'),
        (dict(map='tsne'), 'look.map must be one of'),
        (dict(images=0), 'at least 1, got 0 and 8'),
    ],
)
def test_wrong_settings(options, says):
    with pytest.raises(ValueError, match=says):
        loop(**options)
