"""Weights of a backbone by path."""

import pytest
import timm
import torch

from memengine.models import TimmBackbone

SMALL = dict(img_size=32, patch_size=16, embed_dim=12, depth=1, num_heads=2)
NAME = 'deit_tiny_patch16_224'


def save(file, **settings):
    torch.manual_seed(1)
    model = timm.create_model(NAME, **{**SMALL, **settings})
    torch.save({'model': model.state_dict()}, file)
    return model


@pytest.mark.parametrize('classes', [1000, 0])
def test_weights_are_read_with_and_without_a_classifier(tmp_path, classes):
    expected = save(tmp_path / 'deit.pth', num_classes=classes).state_dict()
    torch.manual_seed(2)
    backbone = TimmBackbone(NAME, checkpoint_path=str(tmp_path / 'deit.pth'), **SMALL)
    given = backbone.model.state_dict()
    assert given.keys() == {name for name in expected if not name.startswith('head.')}
    assert all(torch.equal(given[name], expected[name]) for name in given)


def test_positions_are_resized(tmp_path):
    save(tmp_path / 'deit.pth')
    file = str(tmp_path / 'deit.pth')
    backbone = TimmBackbone(NAME, checkpoint_path=file, **{**SMALL, 'img_size': 64})
    assert backbone(torch.rand(2, 3, 64, 64)).shape == (2, 12)


def test_what_does_not_fit_is_refused(tmp_path):
    save(tmp_path / 'deit.pth')
    with pytest.raises(ValueError, match='there is no file checkpoint_path'):
        TimmBackbone(NAME, checkpoint_path=str(tmp_path / 'none.pth'), **SMALL)
    file = str(tmp_path / 'deit.pth')
    with pytest.raises(ValueError, match=r"does not fit deit_tiny.*missing \['blocks\.1\."):
        TimmBackbone(NAME, checkpoint_path=file, **{**SMALL, 'depth': 2})
    with pytest.raises(ValueError, match='does not fit deit_tiny.*size mismatch'):
        TimmBackbone(NAME, checkpoint_path=file, **{**SMALL, 'embed_dim': 24})
    save(tmp_path / 'deit.pth', depth=2)
    with pytest.raises(ValueError, match=r"unknown \['blocks\.1\."):
        TimmBackbone(NAME, checkpoint_path=file, **SMALL)
