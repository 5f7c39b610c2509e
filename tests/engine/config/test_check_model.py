"""What only the model knows is said before a run has its folder, and what is not sure is not."""

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from torch import nn

from memengine.engine.config.error import ConfigError
from memengine.engine.config.step_of_config import check_model
from memengine.registry import MODELS

BACKBONE = dict(type='TimmBackbone', model_name='test_efficientnet')


def check(backbone, **keys):
    check_model(
        Config(dict(model=dict(type='Classifier', backbone=backbone, num_classes=2), **keys))
    )


@pytest.mark.parametrize('weights', [dict(pretrained=True), dict(checkpoint_path='nothing.pth')])
def test_no_weights_are_read(weights):
    with pytest.raises(ValueError, match="unexpected keyword argument 'dropp'"):
        check({**BACKBONE, **weights, 'dropp': 1})
    check({**BACKBONE, **weights})
    check({**BACKBONE, 'type': 'Unheard'})  # which the run refuses


def test_modules_of_keys_and_of_hooks():
    hooks = [dict(type='DropITHook', gamma=0.5, exclude='backbone.blokcs'), Hook()]
    with pytest.raises(ConfigError) as error:
        check(BACKBONE, activation_checkpointing='backbone.block', custom_hooks=hooks)
    assert [it.partition(';')[0] for it in error.value.problems] == [
        "activation_checkpointing: Classifier has no module 'backbone.block'",
        "dropit: Classifier has no module 'backbone.blokcs'",
    ]
    check(BACKBONE, activation_checkpointing='backbone.block', launcher='pytorch')
    check(BACKBONE, activation_checkpointing='backbone.model.blocks', dropit=0.5)


@MODELS.register_module()
class NamedByAValue(BaseModel):
    def __init__(self):
        super().__init__()
        self.add_module(f'block{int((torch.rand(()) * 0 + 3).item())}', nn.Linear(2, 2))

    def forward(self, inputs, mode='loss'):
        return {}


def test_a_name_that_follows_from_a_value():
    model = dict(type='NamedByAValue')
    check_model(Config(dict(model=model, activation_checkpointing='block3')))
    with pytest.raises(ConfigError, match="has no module 'block2'; did you mean 'block3'"):
        check_model(Config(dict(model=model, activation_checkpointing='block2')))
