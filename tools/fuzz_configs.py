"""Random configs: an algorithm in small, what is learned, and the techniques that carry it out."""

from __future__ import annotations

import copy
import pprint
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fuzz_cases import END, HEAD, is_installed
from same_runs import Data, Runs

_IMPORTS = 'import torch\nfrom same_runs import *\n\ntorch.set_num_threads(1)\n'
_Config = dict[str, Any]


@dataclass(frozen=True)
class OfConfig:
    """A config, and what it is changed by."""

    runs: Runs
    changes: Mapping[str, Any]
    is_lossy: bool = False
    kind = 'configs'

    def script(self) -> str:
        lines = [
            f'runs = {pprint.pformat(self.runs, width=90, sort_dicts=False)}',
            f'changes = {pprint.pformat(self.changes, width=90, sort_dicts=False)}',
            f'result = outcome_of_runs(runs, changes, is_lossy={self.is_lossy})',
        ]
        return '\n'.join([HEAD, _IMPORTS, *lines, END])

    def smaller(self) -> Iterator[OfConfig]:
        for changes in _with_less(self.changes):
            if changes.get('optim_wrapper', {'type': ''}).get('type') is not None:
                yield replace(self, changes=changes)
        for settings in _with_less(self.runs.settings):
            yield replace(self, runs=replace(self.runs, settings=settings))
        if self.runs.precision != 'float64':
            yield replace(self, runs=replace(self.runs, precision='float64'))
        data = self.runs.data
        for samples in (data.batch_size, data.samples - 1):
            if data.batch_size <= samples < data.samples:
                fewer = replace(data, samples=samples)
                yield replace(self, runs=replace(self.runs, data=fewer))


def _with_less(tree: Mapping[str, Any]) -> Iterator[_Config]:
    """The same without one of its entries, or without one below them."""
    for key, value in tree.items():
        yield {name: other for name, other in tree.items() if name != key}
        if isinstance(value, Mapping):
            yield from ({**tree, key: less} for less in _with_less(value) if less)


def draw_config_case(draw: random.Random) -> OfConfig:
    """An algorithm, a precision, and techniques with a step that its loss allows, or does not."""
    in_slices = draw.random() < 0.6
    model, data, slices_count = _draw_model(draw)
    batch_size = draw.randint(2, 7)
    runs = Runs(
        model,
        Data(**data, batch_size=batch_size, samples=draw.randint(batch_size, 3 * batch_size)),
        draw.choices(['float64', 'fp32', 'bf16', 'fp16'], [6, 1, 2, 1])[0],
        _draw_settings(draw),
        slices_count,
    )
    changes = _draw_techniques(draw)
    if is_lossy := draw.random() < 0.2:
        changes |= _draw_lossy(draw)
    is_coupled = model['type'] not in ('Classifier', 'CausalLanguageModel', 'DINO') or (
        'koleo_weight' in model
    )
    if wrapper := _draw_wrapper(draw, is_coupled, in_slices):
        changes['optim_wrapper'] = wrapper
    if is_coupled and 'koleo_weight' not in model and draw.random() < 0.4:
        changes['model'] = {'loss': {'tile_size': draw.choice([1, 2, 3, 5, 100])}}
    return OfConfig(runs, changes, is_lossy)


# ------------------------------------------------------------------ models


def _draw_model(draw: random.Random) -> tuple[_Config, _Config, bool]:
    """A model's config, its data, and whether slices have a part in what it learns."""
    kinds = {
        'SimCLR': 3,
        'SupCon': 3,
        'SelfCon': 3,
        'CLIP': 3,
        'SigLIP': 2,
        'DINO': 4,
        'Classifier': 3,
        'CausalLanguageModel': 2 * is_installed('transformers'),
    }
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    if kind == 'CausalLanguageModel':
        return _language_model(draw)
    backbone, slices_count = _draw_backbone(draw)
    head = {'type': 'ProjectionHead', 'out_dim': 8, 'use_bn': draw.random() < 0.2}
    head |= {'nlayers': draw.randint(1, 3)}
    model: _Config = {'type': kind, 'backbone': backbone, 'head': head}
    data: _Config = {'views': (16, 16)}
    match kind:
        case 'SimCLR':
            model['loss'] = {'type': 'NTXentLoss', 'temperature': 0.3}
        case 'SupCon':
            model |= {'loss': {'type': 'SupConLoss'}, 'use_labels': draw.random() < 0.7}
        case 'SelfCon':
            model |= {'loss': {'type': 'ConLoss'}, 'exits': draw.choice([[0], [1], [0, 1]])}
            data = {'views': draw.choice([(16,), (16, 16)])}
        case 'DINO':
            model, data = _dino(draw, backbone)
            head = model['head']
        case 'Classifier':
            model = {'type': kind, 'backbone': backbone, 'num_classes': 3}
            model['label_smoothing'] = draw.choice([0.0, 0.1])
            head, data = {}, {'views': (16,)}
        case 'CLIP' | 'SigLIP':
            model = {'type': kind, 'image': backbone, 'text': _draw_text(draw), 'embed_dim': 8}
            head, data = {}, {'views': (16,), 'tokens': 5}
            slices_count |= model['text'].get('dropout', 0) > 0
            model['loss'] = {'type': 'ClipLoss' if kind == 'CLIP' else 'SigLipLoss'}
    if kind in ('SimCLR', 'SupCon', 'Classifier') and draw.random() < 0.15:
        model['freeze_backbone'] = True
    return model, data, slices_count or bool(head.get('use_bn'))


def _draw_backbone(draw: random.Random) -> tuple[_Config, bool]:
    if draw.random() < 0.4:
        norm_eval = draw.random() < 0.7
        kind = {'model_name': 'resnet10t', 'channels': [8, 8, 16, 16], 'stem_width': 8}
        return {'type': 'TimmBackbone', **kind, 'norm_eval': norm_eval}, not norm_eval
    drops = draw.random() < 0.25
    sizes = {'img_size': 16, 'patch_size': 8, 'embed_dim': 16, 'num_heads': 2}
    backbone = {'type': 'TimmBackbone', 'model_name': 'vit_tiny_patch16_224', **sizes}
    backbone |= {'depth': draw.randint(2, 4), 'dynamic_img_size': True}
    if draw.random() < 0.5:
        backbone |= {'class_token': False, 'global_pool': 'avg'}
    return backbone | ({'drop_path_rate': 0.3, 'proj_drop_rate': 0.1} if drops else {}), drops


def _draw_text(draw: random.Random) -> _Config:
    if is_installed('transformers') and draw.random() < 0.3:
        sizes = {'vocab_size': 20, 'hidden_size': 16, 'num_hidden_layers': 2}
        sizes |= {'num_attention_heads': 2, 'intermediate_size': 32}
        no_drops = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
        config = {**sizes, **no_drops}
        return {
            'type': 'TransformersText',
            'model_name': 'bert',
            'pretrained': False,
            'config': config,
        }
    sizes = {'vocab_size': 20, 'context_length': 5, 'width': 16, 'num_heads': 2}
    return {'type': 'TextTransformer', **sizes, 'dropout': draw.choice([0.0, 0.0, 0.1])}


def _dino(draw: random.Random, backbone: _Config) -> tuple[_Config, _Config]:
    local = draw.randint(0, 3)
    head = {'type': 'DINOHead', 'out_dim': 12, 'hidden_dim': 16, 'bottleneck_dim': 8}
    head |= {'use_bn': draw.random() < 0.2, 'norm_last_layer': draw.random() < 0.5}
    model = {'type': 'DINO', 'backbone': backbone, 'head': head, 'local_crops': local}
    model |= {'centering': draw.choice(['center', 'sinkhorn']), 'momentum_teacher': 0.5}
    model |= {'freeze_last_layer': draw.choice([0, 0, 1])}
    if draw.random() < 0.5:
        model['koleo_weight'] = 0.1
    return model, {'views': (16, 16) + (8,) * local}


def _language_model(draw: random.Random) -> tuple[_Config, _Config, bool]:
    drop = draw.choice([0.0, 0.0, 0.1])
    config = {'vocab_size': 20, 'n_embd': 16, 'n_layer': 2, 'n_head': 2, 'n_positions': 16}
    config |= {'embd_pdrop': drop, 'resid_pdrop': drop, 'attn_pdrop': drop}
    model = {'type': 'CausalLanguageModel', 'model_name': 'gpt2', 'pretrained': False}
    return {**model, 'config': config}, {'views': (), 'tokens': 7}, drop > 0


# ------------------------------------------------------------------ how it is carried out


def _draw_settings(draw: random.Random) -> _Config:
    settings: _Config = {}
    if draw.random() < 0.3:
        settings['clip_grad'] = {'max_norm': 0.1}
    if draw.random() < 0.15:
        settings |= {'accumulative_counts': 2, 'accumulate_coupled': True}
    return settings


def _draw_wrapper(draw: random.Random, is_coupled: bool, in_slices: bool) -> _Config:
    if not in_slices:
        in_backward = {'type': 'OptimizerInBackwardOptimWrapper'}
        return in_backward if draw.random() < 0.3 else {}
    if draw.random() < 0.05:
        is_coupled = not is_coupled  # to be refused
    size = draw.randint(1, 6)
    if not is_coupled:
        fraction = draw.choice([0] * 5 + [0.5])  # more room for local crops
        return {'type': 'AccumulationOptimWrapper', 'micro_batch_size': size + fraction}
    wrapper = {'type': 'GradCacheOptimWrapper', 'chunk_size': size}
    if draw.random() < 0.5:
        wrapper['keep_graph'] = draw.choice([1, 2, 3, 100, 'auto'])
    if draw.random() < 0.2:
        wrapper['forward_chunk_size'] = size * draw.randint(1, 3)
    return wrapper


def _draw_techniques(draw: random.Random) -> _Config:
    kept = draw.choice(
        [{}, {'every': 2}, {'budget': draw.choice([0.2, 0.5, 0.8])}, {'keep': ['matmuls']}]
    )
    techniques = {
        'activation_checkpointing': {'modules': 'blocks', 'strict': False, **kept},
        'recomputed_activations': {'strict': False},
        'activation_offload': {
            'store': draw.choice(['host', 'disk']),
            'min_bytes': draw.choice([0, 256]),
            'look_ahead': draw.randint(0, 3),
        },
        'efficient_conv_bn_eval': {'strict': False},
        'compile_blocks': {'backend': 'eager'},
    }
    shares = [0.4, 0.4, 0.25, 0.3, 0.04]
    return {
        key: copy.deepcopy(settings)
        for (key, settings), share in zip(techniques.items(), shares, strict=True)
        if draw.random() < share
    }


def _draw_lossy(draw: random.Random) -> _Config:
    if draw.random() < 0.5:
        strategy = draw.choice(['mink', 'block_mink', 'random'])
        dropit = {'strategy': strategy, 'gamma': draw.choice([0.0, 0.5, 0.9])}
        if draw.random() < 0.3:
            dropit['value_bits'] = draw.choice([16, 8, 4])
        return {'dropit': {**dropit, 'strict': False}}
    bits = draw.choice([8, 4, 2, {'linear': 4, 'norm': 8}])
    return {'quantized_activations': {'bits': bits, 'min_numel': draw.choice([0, 64])}}
