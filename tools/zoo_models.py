"""Small models of four libraries, each with a maker and a batch: what the zoo and the fuzz train.

Weights are drawn, inputs are the smallest that a model takes. A library that is not installed
brings no model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        make: Makes it, with weights that it draws.
        batch: Draws a batch, as a tensor or a dict of keyword arguments.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]


def images(size: int = 32) -> Tensor:
    """[B, 3, size, size]."""
    return torch.randn(BATCH, 3, size, size, dtype=torch.float64)


def tokens(length: int = 10, vocabulary: int = 99) -> Tensor:
    """[B, length], none of them a special one."""
    return torch.randint(3, vocabulary, (BATCH, length))


# ------------------------------------------------------------------ timm and torchvision

_TIMM = """resnet10t resnet14t seresnext26t_32x4d skresnet18 gcresnext26ts eca_resnext26ts
botnet26t_256 lambda_resnet26t resnetblur18 regnetx_002 regnety_002 regnetz_005 mobilenetv2_035
mobilenetv3_small_050 mobilenetv4_conv_small_035 efficientnet_b0 efficientnet_lite0 tinynet_e
mnasnet_small semnasnet_075 lcnet_035 fbnetc_100 hardcorenas_a ghostnet_050 ghostnetv2_100 mixnet_s
spnasnet_100 rexnet_100 dla46_c dla34 hrnet_w18_small ese_vovnet19b_slim_dw densenet121 dpn48b
nf_regnet_b0 eca_nfnet_l0 repvgg_a0 mobileone_s0 fastvit_t8 repghostnet_050 repvit_m0_9
convnext_atto convnextv2_atto inception_next_atto edgenext_xx_small mobilevit_xxs mobilevitv2_050
efficientformerv2_s0 efficientvit_b0 efficientvit_m0 levit_128s poolformer_s12 caformer_s18
pvt_v2_b0 twins_svt_small swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
swinv2_cr_tiny_ns_224 coatnet_nano_rw_224 coat_lite_tiny maxvit_rmlp_pico_rw_256 mixer_s32_224
gmlp_s16_224 resmlp_12_224 vit_tiny_patch16_224 deit_tiny_distilled_patch16_224
deit3_small_patch16_224 eva02_tiny_patch14_224 cait_xxs24_224 xcit_nano_12_p8_224 crossvit_tiny_240
tnt_s_legacy_patch16_224 visformer_tiny volo_d1_224 pit_ti_224 convit_tiny nest_tiny sequencer2d_s
focalnet_tiny_srf davit_tiny gcvit_xxtiny hiera_tiny_224 tiny_vit_5m_224 nextvit_small mvitv2_tiny
cs3darknet_s starnet_s1 shvit_s1 mambaout_femto vitamin_small_224 swiftformer_xs selecsls42
hgnetv2_b0 fasternet_t0 vit_relpos_small_patch16_224 flexivit_small"""
_TORCHVISION = """convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet
mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d
shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vit maxvit
segmentation/lraspp_mobilenet_v3_large segmentation/fcn_resnet50 video/r3d_18"""
_SIZES = {'crossvit_tiny_240': 240, 'maxvit': 64}
_CLASSES_OF_TORCHVISION: dict[str, tuple[str, dict[str, Any]]] = {
    'vit': (
        'VisionTransformer',
        dict(image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=64),
    ),
    'maxvit': (
        'MaxVit',
        dict(input_size=(64, 64), partition_size=2, stem_channels=16, block_channels=[16, 32])
        | dict(block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.1),
    ),
}


def _timm_model(name: str) -> nn.Module:
    timm = importlib.import_module('timm')
    try:
        return timm.create_model(name, num_classes=5, img_size=32)
    except (TypeError, AssertionError):  # takes no size, or takes its own only
        return timm.create_model(name, num_classes=5)


def _torchvision_model(name: str) -> nn.Module:
    models = importlib.import_module('torchvision.models')
    if name in _CLASSES_OF_TORCHVISION:
        kind, settings = _CLASSES_OF_TORCHVISION[name]
        return getattr(models, kind)(num_classes=5, **settings)
    task, _, last = name.rpartition('/')
    settings = dict(num_classes=5, weights=None)
    if task == 'segmentation':
        settings |= dict(weights_backbone=None)
    elif last == 'googlenet':
        settings |= dict(aux_logits=False, init_weights=False)
    return models.get_model(last, **settings)


def _videos() -> Tensor:
    return torch.randn(BATCH, 3, 4, 16, 16, dtype=torch.float64)


# ------------------------------------------------------------------ transformers

_SMALL = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_DECODER = {**_SMALL, 'use_cache': False}
_GROUPED = {**_DECODER, 'num_key_value_heads': 2, 'head_dim': 8}
_BOTH = dict(
    vocab_size=99,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
_VISION = dict(
    image_size=32,
    patch_size=8,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
)
_T5 = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False)
_EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2)

# What a model is made from: the name of its config's class and what that is given.
_OF_TEXT: dict[str, dict[str, Any]] = {
    'Bert': _SMALL,
    'Roberta': _SMALL,
    'Albert': {**_SMALL, 'embedding_size': 16},
    'DistilBert': dict(vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    'Electra': {**_SMALL, 'embedding_size': 16},
    'MPNet': _SMALL,
    'Deberta': {**_SMALL, 'relative_attention': True, 'pos_att_type': ['c2p', 'p2c']},
    'DebertaV2': {**_SMALL, 'relative_attention': True, 'pos_att_type': ['c2p', 'p2c']},
    'ConvBert': {**_SMALL, 'embedding_size': 16},
    'SqueezeBert': {**_SMALL, 'embedding_size': 32},
    'FNet': _SMALL,
    'RemBert': {**_SMALL, 'input_embedding_size': 16, 'output_embedding_size': 16},
    'RoFormer': {**_SMALL, 'embedding_size': 16},
    'Ernie': _SMALL,
    'MegatronBert': _SMALL,
    'ModernBert': _SMALL,
    'XLNet': dict(vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=64, use_mems_train=False),
    'GPT2': _DECODER,
    'GPTNeo': dict(vocab_size=99, hidden_size=32, num_layers=2, num_heads=4, window_size=4)
    | dict(attention_types=[[['global', 'local'], 1]], max_position_embeddings=64, use_cache=False),
    'GPTNeoX': _DECODER,
    'GPTJ': {**_DECODER, 'rotary_dim': 4},
    'OPT': {**_DECODER, 'ffn_dim': 64, 'word_embed_proj_dim': 32},
    'Bloom': _DECODER,
    'Falcon': _DECODER,
    'Llama': _GROUPED,
    'Mistral': _GROUPED,
    'Mixtral': {**_GROUPED, **_EXPERTS},
    'Qwen2': _GROUPED,
    'Qwen3': _GROUPED,
    'Phi': _DECODER,
    'Phi3': _GROUPED,
    'Gemma': _GROUPED,
    'Gemma2': _GROUPED,
    'Olmo2': _GROUPED,
    'StableLm': _GROUPED,
    'Starcoder2': _GROUPED,
    'Cohere': _GROUPED,
    'Granite': _GROUPED,
    'Mamba': dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4)
    | dict(time_step_rank=4, use_cache=False),
}
_OF_BOTH: dict[str, dict[str, Any]] = {
    'T5': _T5,
    'MT5': _T5,
    'Bart': _BOTH,
    'MBart': _BOTH,
    'Pegasus': _BOTH,
    'M2M100': _BOTH,
    'Blenderbot': _BOTH,
}
_STAGES = dict(image_size=32, depths=[1, 1], embed_dim=16, num_heads=[2, 2], window_size=2)
_WIDTHS = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2])
_OF_IMAGES: dict[str, dict[str, Any]] = {
    'ViT': _VISION,
    'DeiT': _VISION,
    'Beit': _VISION,
    'Dinov2': _VISION,
    'IJepa': _VISION,
    'Swin': {**_STAGES, 'patch_size': 4},
    'Swinv2': {**_STAGES, 'patch_size': 4},
    'ConvNext': dict(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1]),
    'ConvNextV2': dict(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1]),
    'Segformer': dict(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    'PoolFormer': dict(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1]),
    'ResNet': _WIDTHS,
    'RegNet': _WIDTHS,
    'MobileNetV2': dict(depth_multiplier=0.35),
    'FocalNet': dict(image_size=32, embed_dim=16, depths=[1, 2], hidden_sizes=[16, 32])
    | dict(focal_levels=[1, 1], focal_windows=[3, 3]),
}
_OF_SOUND: dict[str, dict[str, Any]] = {
    'Wav2Vec2': {**_SMALL, 'conv_dim': (8, 8), 'conv_stride': (5, 2), 'conv_kernel': (10, 3)}
    | dict(num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
}


def _transformers_model(name: str, settings: Mapping[str, Any]) -> nn.Module:
    transformers = importlib.import_module('transformers')
    config = getattr(transformers, f'{name}Config')(**settings)
    if 'num_local_experts' in settings:  # the default kernel has no float64
        return transformers.AutoModel.from_config(config, experts_implementation='eager')
    return transformers.AutoModel.from_config(config)


def _text() -> dict[str, Tensor]:
    return {'input_ids': tokens()}


def _two_texts() -> dict[str, Tensor]:
    return {'input_ids': tokens(), 'decoder_input_ids': tokens(7)}


def _pixels() -> dict[str, Tensor]:
    return {'pixel_values': images()}


def _sound() -> dict[str, Tensor]:
    return {'input_values': torch.randn(BATCH, 800, dtype=torch.float64)}


# ------------------------------------------------------------------ open_clip

_TEXT_TOWER = dict(context_length=8, vocab_size=99, width=32, heads=4, layers=2)
_VIT_TOWER = dict(image_size=32, patch_size=8, width=32, layers=2, head_width=8)
_RESNET_TOWER = dict(image_size=32, layers=[1, 1, 1, 1], width=8, patch_size=None)
_CLIPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # vision, text
    'ViT': (_VIT_TOWER, _TEXT_TOWER),
    'ViT, patch dropout': ({**_VIT_TOWER, 'patch_dropout': 0.5}, _TEXT_TOWER),
    'ViT, layer scale': ({**_VIT_TOWER, 'ls_init_value': 0.1}, _TEXT_TOWER),
    'ViT, attentional pool': ({**_VIT_TOWER, 'attentional_pool': True}, _TEXT_TOWER),
    'ViT, average pool': ({**_VIT_TOWER, 'pool_type': 'avg'}, _TEXT_TOWER),
    'ViT, text without causal mask': (
        _VIT_TOWER,
        {**_TEXT_TOWER, 'no_causal_mask': True, 'pool_type': 'last'},
    ),
    'ResNet': (_RESNET_TOWER, _TEXT_TOWER),
    'timm ConvNeXt': (
        dict(timm_model_name='convnext_atto', timm_pool='', timm_proj='linear', image_size=32),
        _TEXT_TOWER,
    ),
}


def _clip(vision: dict[str, Any], text: dict[str, Any]) -> nn.Module:
    open_clip = importlib.import_module('open_clip')
    return open_clip.model.CLIP(32, vision_cfg=vision, text_cfg=text)


def _pairs() -> dict[str, Tensor]:
    return {'image': images(), 'text': tokens(8)}


# ------------------------------------------------------------------ all


def zoo() -> dict[str, Entry]:
    """All models of the libraries that are installed, by library and name."""
    entries = {}
    for kinds, batch in (
        (_OF_TEXT, _text),
        (_OF_BOTH, _two_texts),
        (_OF_IMAGES, _pixels),
        (_OF_SOUND, _sound),
    ):
        for name, settings in kinds.items():
            make = partial(_transformers_model, name, settings)
            entries[f'transformers/{name}'] = Entry(make, batch)
    for name, towers in _CLIPS.items():
        entries[f'open_clip/{name}'] = Entry(partial(_clip, *towers), _pairs)
    for name in _TORCHVISION.split():
        batch = _videos if name.startswith('video') else partial(images, _SIZES.get(name, 32))
        entries[f'torchvision/{name}'] = Entry(partial(_torchvision_model, name), batch)
    for name in _TIMM.split():
        batch = partial(images, _SIZES.get(name, 32))
        entries[f'timm/{name}'] = Entry(partial(_timm_model, name), batch)
    return {
        name: entry
        for name, entry in entries.items()
        if importlib.util.find_spec(name.partition('/')[0])
    }
