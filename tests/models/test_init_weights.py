"""Weights that parts of MMEngine's kind say they start from, inside algorithms."""

import pytest
import torch
from mmengine.model import BaseModule
from torch import nn

from memengine.engine.runner.wrapping import refuse_unread_init_cfg
from memengine.models import CLIP, DINO, SimCLR, TimmBackbone
from tests.models.toy import HEAD, TEXT, VIT


class Maps(BaseModule):
    """A backbone as mmpretrain has them."""

    def __init__(self, init_cfg=None):
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(1, 4, 2)

    def forward(self, images):
        return (self.conv(images),)


def pooled(**init_cfg):
    inner = dict(type=Maps, init_cfg=init_cfg or None)
    return dict(type='PooledBackbone', backbone=inner, num_features=4)


def constant(value):
    return dict(type='Constant', layer='Conv2d', val=value)


def file_of(tmp_path, value, prefix=''):
    path = tmp_path / f'{value}.pth'
    torch.save({f'{prefix}conv.weight': torch.full((4, 1, 2, 2), value)}, path)
    return dict(type='Pretrained', checkpoint=str(path))


def is_filled_with(weight, value):
    return torch.equal(weight.detach(), torch.full_like(weight, value))


def test_a_file_of_a_backbones_init_cfg_is_read(tmp_path):
    model = SimCLR(pooled(**file_of(tmp_path, 3.0)), HEAD)
    model.init_weights()
    conv = model.backbone.backbone.conv
    assert is_filled_with(conv.weight, 3.0)
    nn.init.ones_(conv.weight)
    model.init_weights()  # a second time nothing is given
    assert is_filled_with(conv.weight, 1.0)


def test_a_frozen_tower_is_not_left_as_it_was_drawn(tmp_path):
    model = CLIP(pooled(**file_of(tmp_path, 3.0)), {**TEXT, 'width': 4}, frozen=['image'])
    model.init_weights()
    assert is_filled_with(model.towers['image'].backbone.backbone.conv.weight, 3.0)


def test_a_parts_own_comes_after_the_algorithms_but_for_a_file(tmp_path):
    model = SimCLR(pooled(**constant(3.0)), HEAD, init_cfg=constant(5.0))
    model.init_weights()
    assert is_filled_with(model.backbone.backbone.conv.weight, 3.0)
    read = file_of(tmp_path, 7.0, 'backbone.backbone.')
    model = SimCLR(pooled(**constant(3.0)), HEAD, init_cfg=[read, constant(5.0)])
    model.init_weights()
    assert is_filled_with(model.backbone.backbone.conv.weight, 7.0)


@pytest.mark.parametrize(
    ('backbone', 'init_cfg'),
    [
        (pooled(type='Normal', layer='Conv2d'), None),
        (VIT, dict(type='Normal', layer='Linear', std=0.1)),
    ],
)
def test_dinos_teacher_begins_as_the_student_whatever_was_drawn(backbone, init_cfg):
    head = dict(type='DINOHead', out_dim=5, hidden_dim=4, bottleneck_dim=3)
    model = DINO(backbone, head, local_crops=0, init_cfg=init_cfg)
    before = model.student.backbone.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    model.init_weights()
    student, teacher = model.student.state_dict(), model.teacher.state_dict()
    assert all(torch.equal(student[key], teacher[key]) for key in student)
    after = model.student.backbone.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)


class Holds(BaseModule):
    """What says nothing of what it starts from, around a network of timm's."""

    num_features = 12

    def __init__(self):
        super().__init__()
        self.network = TimmBackbone(**{k: v for k, v in VIT.items() if k != 'type'}).model

    def forward(self, images):
        return self.network(images)


@pytest.mark.parametrize(('backbone', 'name'), [(VIT, 'model'), (dict(type=Holds), 'network')])
def test_what_initialises_itself_is_left_alone(backbone, name):
    """timm's init_weights() would draw pretrained weights anew."""
    model = SimCLR(backbone, HEAD)
    network = getattr(model.backbone, name)
    with torch.no_grad():
        network.pos_embed.fill_(2.0)
    model.init_weights()
    assert is_filled_with(network.pos_embed, 2.0)


def test_init_cfg_is_refused_where_it_is_not_read():
    refuse_unread_init_cfg(SimCLR(pooled(), HEAD))
    with pytest.raises(ValueError, match=r'model\.backbone\.backbone has an init_cfg'):
        refuse_unread_init_cfg(SimCLR(pooled(**constant(3.0)), HEAD))
    with pytest.raises(ValueError, match=r'meta=True: model has an init_cfg'):
        refuse_unread_init_cfg(SimCLR(VIT, HEAD, init_cfg=constant(3.0)))
