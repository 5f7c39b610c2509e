"""Image encoders of torchvision, and of transformers and open_clip, which are optional packages.

Shapes: B images, N tokens of an image, D width of the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memengine.engine.checkpoint.files import safe_loading
from memengine.engine.checkpoint.weights import read_weights
from memengine.models.backbones.text_libraries import (
    open_clip_model,
    transformers_encoder,
)
from memengine.registry import MODELS
from memengine.suggest import did_you_mean


@MODELS.register_module()
class TorchvisionBackbone(nn.Sequential):
    """A classifier of torchvision without its last linear layer: images to features [B, D].

    Args:
        model_name: Name in torchvision, e.g. ``'resnet50'`` or ``'vit_b_16'``.
        weights: Name of torchvision's weights, e.g. ``'DEFAULT'``, which are fetched; None starts
            from scratch.
        checkpoint_path: File of weights by torchvision's names, with or without the classifier.
        **kwargs: Passed on to torchvision, e.g. ``image_size``.

    Raises:
        ValueError: For a name or an argument that torchvision does not know, a model that does not
            end in a linear layer or has classifiers in its middle, or a file that does not fit.

    Attributes:
        model: The torchvision module.
        model_name: Its name in torchvision.
        arguments: What torchvision was given beside it.
        num_features: Width D of the features.
    """

    def __init__(
        self, model_name: str, weights: str | None = None, checkpoint_path: str = '', **kwargs: Any
    ) -> None:
        from torchvision import models

        super().__init__()
        if model_name not in (names := models.list_models(module=models)):
            raise ValueError(
                f'TorchvisionBackbone: torchvision has no classifier {model_name!r}'
                f'{did_you_mean(model_name, names, after=";")}'
            )
        self.model_name, self.arguments = model_name, kwargs
        try:
            with safe_loading(f'The pretrained file of {model_name}'):
                model: Any = models.get_model(model_name, weights=weights, **kwargs)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'TorchvisionBackbone: {model_name}: {error}') from error
        name, last = list(model.named_modules())[-1]
        if not isinstance(last, nn.Linear):
            raise ValueError(
                f'TorchvisionBackbone: {model_name} does not end in a linear layer; use another '
                'model, or TimmBackbone'
            )
        if vars(model).get('aux_logits'):  # GoogLeNet and Inception, whose outputs are several
            raise ValueError(
                f'TorchvisionBackbone: {model_name} trains classifiers of its own in its middle; '
                'set aux_logits=False'
            )
        self.num_features = last.in_features
        model.set_submodule(name, nn.Identity())
        self.model = model
        if checkpoint_path:
            state = read_weights(checkpoint_path)
            state = {key: value for key, value in state.items() if not key.startswith(f'{name}.')}
            _load(model, state, f'TorchvisionBackbone: checkpoint_path={checkpoint_path!r}')


def _load(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = ' '.join(line.strip() for line in str(error).splitlines()[:2])
        raise ValueError(f'{what} does not fit: {first}') from error


@MODELS.register_module()
class TransformersImage(nn.Module):
    """A Vision Transformer of the transformers library, such as ViT, BEiT or DINOv2.

    Args:
        model_name: Name on the hub or a folder, e.g. ``'facebook/dinov2-small'``. With
            ``pretrained=False`` and ``config`` only the kind of model: ``'dinov2'``.
        pretrained: Load the weights (needs the network or the library's cache).
        config: Entries of the model's configuration, e.g. ``dict(num_hidden_layers=2)``.
        pool: ``'token'`` takes the first token, ``'mean'`` the mean of all, of the last layer.

    Raises:
        ImportError: When transformers is missing.
        ValueError: For a model that it does not know, or whose configuration has no width of
            tokens: most give maps (ConvNeXt, ResNet).

    Attributes:
        model: The library's module.
        model_name: Its name there.
        arguments: The entries of its configuration.
        num_features: Width D of the features.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = True,
        config: Mapping[str, Any] | None = None,
        pool: Literal['token', 'mean'] = 'token',
    ) -> None:
        super().__init__()
        self.model: Any = transformers_encoder(model_name, pretrained, config, 'TransformersImage')
        self.pool = pool
        self.model_name, self.arguments = model_name, dict(config or {})
        width = getattr(self.model.config, 'hidden_size', None)
        if not isinstance(width, int):  # of maps there is one by stage
            raise ValueError(
                f'TransformersImage: {model_name!r} ({type(self.model).__name__}) has no '
                'hidden_size, the width of the tokens of a Vision Transformer; use such a one, or '
                'TimmBackbone'
            )
        self.num_features = width

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to features [B, D]."""
        tokens = self.model(pixel_values=images).last_hidden_state  # [B, N, D]
        return tokens[:, 0] if self.pool == 'token' else tokens.mean(dim=1)


@MODELS.register_module()
class OpenClipImage(nn.Module):
    """The image tower of an open_clip model, with its projection.

    Args:
        model_name: Name in open_clip, e.g. ``'ViT-B-32'``, or ``'hf-hub:<repository>'``.
        pretrained: Tag or file of pretrained weights; None starts from scratch.

    Raises:
        ImportError: When open_clip is missing.
        ValueError: For a name or weights that open_clip does not know.

    Attributes:
        model: The library's module.
        model_name: Its name there.
        num_features: Width D of the features.
    """

    def __init__(self, model_name: str, pretrained: str | None = None) -> None:
        super().__init__()
        whole = open_clip_model(model_name, pretrained, 'OpenClipImage')
        self.model: Any = whole.visual
        self.model_name = model_name
        size = self.model.image_size
        height, width = (size, size) if isinstance(size, int) else size
        with torch.no_grad():
            self.model.eval()
            self.num_features: int = self.model(torch.zeros(1, 3, height, width)).shape[-1]
            self.model.train()

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W], normalised as open_clip does, to features [B, D]."""
        return self.model(images)
