"""A CLIP run in open_clip's own layout, read back by open_clip.

Shapes: B images or texts, W width of a tower, D of open_clip's space, E of the run's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memengine.evaluation.after_training.backbones import Backbone


def export_to_open_clip(whole: Backbone, images: Tensor, folder: Path) -> tuple[str, float]:
    """Write ``NAME.json`` and ``open_clip.pt``; how they are loaded, and the error."""
    import open_clip

    model: Any = whole.module
    name = f'{_names(model).pop()}-memengine'
    config = open_clip.get_model_config(name.removesuffix('-memengine'))
    state = open_clip_state(model)
    config['embed_dim'] = model.towers['image'].projection.out_features
    if 'logit_bias' in state:  # SigLIP's
        config['init_logit_bias'] = state['logit_bias'].item()
    (folder / f'{name}.json').write_text(json.dumps(config, indent=2) + '\n')
    path = folder / 'open_clip.pt'  # older versions of open_clip read no safetensors
    torch.save(state, path)
    open_clip.add_model_config(folder / f'{name}.json')
    loaded: Any = open_clip.create_model(name, pretrained=str(path)).eval()
    tokens = torch.arange(1, 1 + loaded.context_length)[None] % 7 + 1
    ours = model.embed(images, {'tokens': tokens})
    errors = [
        ((found - ours[key]).abs().max() / ours[key].abs().max()).item()
        for key, found in (
            ('image', loaded.encode_image(images)),
            ('text', loaded.encode_text(tokens)),
        )
    ]
    arguments, comments = _transforms(whole.preprocessing)
    call = ''.join(
        f'    {key}={value!r},\n' for key, value in dict(pretrained=path.name, **arguments).items()
    )
    code = (
        f"import open_clip\n\nopen_clip.add_model_config('{name}.json')\n"
        f"model, _, transform = open_clip.create_model_and_transforms(\n    '{name}',\n{call})"
    )
    return '\n'.join([code, *comments]), max(errors)


def _transforms(preprocessing: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What has open_clip make images as the run does, and comments on what it would do otherwise.

    A file of weights says nothing of it: what is not given is done as for OpenAI's models.
    """
    arguments: dict[str, Any] = {}
    unknown = []
    if 'mean' in preprocessing:
        arguments = {f'image_{key}': tuple(preprocessing[key]) for key in ('mean', 'std')}
    else:
        unknown.append('mean and std')
    share = preprocessing.get('crop_pct')
    interpolation = preprocessing.get('interpolation', 'bicubic')
    if share and round(share, 6) == 1 and interpolation in ('bicubic', 'bilinear'):
        squashed = preprocessing.get('crop_mode') == 'squash'
        arguments['image_interpolation'] = interpolation
        arguments['image_resize_mode'] = 'squash' if squashed else 'shortest'
    else:
        unknown.append('resizing')
    comments = [f"# transform's {what}: open_clip's own, not the run's" for what in unknown]
    return arguments, comments


def _names(model: nn.Module) -> set[str]:
    """The name of open_clip's model, of which both towers are."""
    towers = dict(model.named_children()).get('towers', nn.ModuleDict())
    kinds = {
        key: type(tower.backbone).__name__
        for key, tower in towers.items()  # type: ignore[operator]
    }
    wanted = {'image': 'OpenClipImage', 'text': 'OpenClipText'}
    names = {tower.backbone.model_name for tower in towers.values()} if kinds == wanted else set()  # type: ignore[operator]
    if len(names) != 1:
        raise ValueError(
            "export.to=['open_clip'] wants a CLIP whose towers are OpenClipImage and OpenClipText "
            f'of one model, got {kinds or type(model).__name__}; export the towers one by one: '
            'export.part'
        )
    return names


def open_clip_state(model: Any) -> dict[str, Tensor]:
    """The weights by open_clip's names, the run's projections multiplied into its own.

    A tower ends in ``x @ proj`` with proj [W, D], and then in the run's ``@ weight.T`` with weight
    [E, D]: together ``x @ (proj @ weight.T)``.
    """
    image, text = model.towers['image'], model.towers['text']
    state = {f'visual.{key}': v for key, v in image.backbone.model.state_dict().items()}
    state |= text.backbone.model.state_dict()
    for name, tower in (('visual.proj', image), ('text_projection', text)):
        if name not in state or isinstance(tower.projection, nn.Identity):
            raise ValueError(
                f"export.to=['open_clip']: there is no {name} to put the projection into; a ViT "
                'that is trained, with a text Transformer, is wanted'
            )
        state[name] = state[name] @ tower.projection.weight.T
    own = dict(model.named_parameters(recurse=False))
    state |= {key: own[key] for key in ('logit_scale', 'logit_bias') if key in own}
    return {key: value.detach().clone().contiguous() for key, value in state.items()}
