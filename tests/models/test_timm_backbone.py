"""Weights of a backbone by path."""

import pytest
import timm
import torch
from mmengine.logging import HistoryBuffer

from memengine.engine.checkpoint.convert import convert
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


def test_a_run_s_own_checkpoint_is_read_by_the_part_that_is_the_model(tmp_path):
    model = save(tmp_path / 'deit.pth', num_classes=0)
    whole = {
        f'{who}.backbone.model.{name}': value
        for who in ('student', 'teacher')
        for name, value in model.state_dict().items()
    }
    log = HistoryBuffer([1.0], [1])  # what MMEngine's own checkpoints hold
    torch.save({'state_dict': whole, 'message_hub': log}, tmp_path / 'run.pth')
    file = str(tmp_path / 'run.pth')
    with pytest.raises(ValueError, match="as checkpoint_part='teacher.backbone.model'$") as caught:
        TimmBackbone(NAME, checkpoint_path=file, **SMALL)
    assert 'weights_only' not in str(caught.value)
    part = 'teacher.backbone.model'
    backbone = TimmBackbone(NAME, checkpoint_path=file, checkpoint_part=part, **SMALL)
    for name, value in backbone.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    convert(file, tmp_path / 'run.dcp')
    TimmBackbone(NAME, checkpoint_path=str(tmp_path / 'run.dcp'), checkpoint_part=part, **SMALL)


def test_batch_statistics_may_stay_those_of_the_weights():
    backbone = TimmBackbone('resnet18', in_chans=1, norm_eval=True).train()
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    backbone(torch.randn(2, 1, 16, 16))
    assert backbone.training and len(before) > 0
    assert all(torch.equal(value, before[name]) for name, value in backbone.named_buffers())
