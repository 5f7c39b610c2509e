"""Files in the layouts that their authors publish: the names of DINO, DINOv2 and CLIP.

They are made here, small, by the public definitions of these networks.
"""

import argparse

import pytest
import timm
import torch
from torch import nn

from memengine.engine.checkpoint.files import CheckpointError
from memengine.engine.checkpoint.weights import read_weights
from memengine.models import TimmBackbone
from tests.models.test_timm_backbone import NAME, SMALL, save

WIDTH = 12


def block(index):
    """Names and shapes of a block of DINO's ViT."""
    name = f'blocks.{index}'
    return {
        **{f'{name}.norm{i}.{kind}': (WIDTH,) for i in (1, 2) for kind in ('weight', 'bias')},
        f'{name}.attn.qkv.weight': (3 * WIDTH, WIDTH),
        f'{name}.attn.qkv.bias': (3 * WIDTH,),
        f'{name}.attn.proj.weight': (WIDTH, WIDTH),
        f'{name}.attn.proj.bias': (WIDTH,),
        f'{name}.mlp.fc1.weight': (4 * WIDTH, WIDTH),
        f'{name}.mlp.fc1.bias': (4 * WIDTH,),
        f'{name}.mlp.fc2.weight': (WIDTH, 4 * WIDTH),
        f'{name}.mlp.fc2.bias': (WIDTH,),
    }


def vit(patch, tokens):
    return {
        'cls_token': (1, 1, WIDTH),
        'pos_embed': (1, 1 + tokens, WIDTH),
        'patch_embed.proj.weight': (WIDTH, 3, patch, patch),
        'patch_embed.proj.bias': (WIDTH,),
        **block(0),
        'norm.weight': (WIDTH,),
        'norm.bias': (WIDTH,),
    }


def made(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_dino_backbone_and_full_checkpoint(tmp_path):
    weights = made(vit(16, 4))
    torch.save(weights, tmp_path / 'pretrain.pth')
    head = {'head.mlp.0.weight': torch.ones(2)}
    backbone = {f'backbone.{name}': value for name, value in weights.items()}
    full = dict(
        student={f'module.{name}': -value for name, value in {**backbone, **head}.items()},
        teacher={**backbone, **head},
        optimizer=dict(state={0: dict(step=1)}, param_groups=[]),
        epoch=100,
        args=argparse.Namespace(arch='vit_small'),
        dino_loss={'center': torch.zeros(1, 4)},
    )
    torch.save(full, tmp_path / 'full.pth')
    alone = TimmBackbone(NAME, checkpoint_path=str(tmp_path / 'pretrain.pth'), **SMALL)
    file = str(tmp_path / 'full.pth')
    with pytest.raises(ValueError, match="as checkpoint_part='teacher.backbone'"):
        TimmBackbone(NAME, checkpoint_path=file, **SMALL)
    part = TimmBackbone(NAME, checkpoint_path=file, checkpoint_part='teacher.backbone', **SMALL)
    for name, value in weights.items():
        assert torch.equal(alone.model.state_dict()[name], value)
        assert torch.equal(part.model.state_dict()[name], value)


@pytest.mark.parametrize('registers', [0, 4])
def test_dinov2(tmp_path, registers):
    """The position of the class token is added to it where there are registers."""
    weights = made(vit(14, 16) | {'blocks.0.ls1.gamma': (WIDTH,), 'blocks.0.ls2.gamma': (WIDTH,)})
    weights['mask_token'] = torch.zeros(1, WIDTH)
    if registers:
        weights['register_tokens'] = torch.randn(1, registers, WIDTH)
    teacher = {f'backbone.{name}': value for name, value in weights.items()}
    torch.save(weights, tmp_path / 'pretrain.pth')
    torch.save({'teacher': teacher}, tmp_path / 'teacher_checkpoint.pth')
    name = f'vit_small_patch14_{"reg4_" if registers else ""}dinov2'
    small = dict(img_size=56, embed_dim=WIDTH, depth=1, num_heads=2)
    images = torch.randn(2, 3, 56, 56)
    found = [
        TimmBackbone(name, checkpoint_path=str(tmp_path / file), checkpoint_part=part, **small)
        for file, part in (('pretrain.pth', ''), ('teacher_checkpoint.pth', 'teacher.backbone'))
    ]
    assert torch.equal(found[0].eval()(images), found[1].eval()(images))
    state = found[0].model.state_dict()
    assert torch.equal(state['blocks.0.ls1.gamma'], weights['blocks.0.ls1.gamma'])
    token, places = weights['cls_token'], weights['pos_embed']
    assert torch.equal(state['cls_token'], token + places[:, :1] if registers else token)


def test_clips_image_tower(tmp_path):
    open_clip = pytest.importorskip('open_clip', reason='open_clip is not installed')
    torch.manual_seed(0)
    vision = open_clip.transformer.VisionTransformer(
        32, 8, 12, 1, 2, 4.0, output_dim=6, act_layer=nn.GELU
    ).eval()
    nn.init.normal_(vision.ln_pre.bias)
    state = {f'visual.{name}': value for name, value in vision.state_dict().items()}
    state['logit_scale'] = torch.tensor(4.6)
    state['token_embedding.weight'] = torch.zeros(3, 12)
    torch.save(state, tmp_path / 'clip.pth')
    small = dict(img_size=32, patch_size=8, embed_dim=12, depth=1, num_heads=2)
    backbone = TimmBackbone(
        'vit_base_patch32_clip_224', checkpoint_path=str(tmp_path / 'clip.pth'), **small
    ).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images) @ vision.proj, vision(images))


@pytest.mark.filterwarnings('ignore')  # TorchScript is deprecated, and these files are there
def test_a_program_is_not_run_and_nobody_is_told_to(tmp_path):
    path = tmp_path / 'ViT-B-32.pt'
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    with pytest.raises(CheckpointError, match='is a TorchScript program, which is code') as caught:
        read_weights(str(path))
    assert 'weights_only' not in str(caught.value)


def test_a_run_by_its_folder(tmp_path):
    model = save(tmp_path / 'other.pth', num_classes=0)
    (tmp_path / 'run').mkdir()

    def write(name, factor):
        state = {f'backbone.model.{key}': factor * v for key, v in model.state_dict().items()}
        whole = dict(state_dict=state, optimizer={}, meta=dict(iter=factor))
        torch.save(whole, tmp_path / 'run' / name)

    def bias():
        backbone = TimmBackbone(NAME, checkpoint_path=str(tmp_path / 'run'), **SMALL)
        return backbone.model.norm.weight[0].item()

    write('epoch_2.pth', 2)
    write('epoch_3.pth', 3)
    assert bias() == 3.0, 'the newest, of which the only part that fits is taken'
    write('best_knn_top1_epoch_1.pth', 5)
    assert bias() == 5.0
    write('best_loss_epoch_2.pth', 7)
    with pytest.raises(CheckpointError, match='best of several metrics: name one of best_knn'):
        bias()
    (tmp_path / 'empty').mkdir()
    with pytest.raises(CheckpointError, match='no checkpoint of a run in'):
        read_weights(str(tmp_path / 'empty'))


def test_what_timm_names_stays_what_it_is():
    """A made file of DINO has exactly the names of timm's network."""
    network = timm.create_model(NAME, num_classes=0, **SMALL)
    assert {k: tuple(v.shape) for k, v in network.state_dict().items()} == vit(16, 4)
