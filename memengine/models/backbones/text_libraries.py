"""Text encoders of open_clip and of transformers, which are optional packages.

Shapes: B texts, L tokens each, D width of the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mmengine.utils import digit_version
from torch import Tensor, nn

from memengine.engine.checkpoint.files import safe_loading
from memengine.models.backbones.text_transformer import mean_of_tokens
from memengine.registry import MODELS
from memengine.suggest import import_optional


@MODELS.register_module()
class OpenClipText(nn.Module):
    """The text tower of an open_clip model, with its projection; its image tower is left out.

    Args:
        model_name: Name in open_clip, e.g. ``'ViT-B-32'``, or ``'hf-hub:<repository>'``.
        pretrained: Tag or file of pretrained weights; None starts from scratch.

    Raises:
        ImportError: When open_clip is missing.
        ValueError: For a name or weights that open_clip does not know.

    Attributes:
        model: The library's module, without its image tower.
        model_name: Its name there.
        num_features: Width D of the features.
    """

    def __init__(self, model_name: str, pretrained: str | None = None) -> None:
        super().__init__()
        model = open_clip_model(model_name, pretrained, 'OpenClipText')
        self.model_name = model_name
        if hasattr(model, 'visual'):
            model.visual = None  # encode_text works without it
        for unused in ('logit_scale', 'logit_bias'):
            if getattr(model, unused, None) is not None:
                setattr(model, unused, None)
        self.model = model
        with torch.no_grad():
            length = int(model.context_length)
            self.num_features: int = self.forward(torch.ones(1, length).long()).shape[-1]

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens Long[B, L] (of open_clip's own tokenizer) to features [B, D]."""
        return self.model.encode_text(tokens)


def open_clip_model(model_name: str, pretrained: str | None, user: str) -> Any:
    """A model of open_clip with both towers, not normalised or moved anywhere."""
    open_clip = import_optional('open_clip', user, 'open_clip_torch')
    try:
        with safe_loading(f'The pretrained file of {model_name}'):
            return open_clip.create_model(model_name, pretrained=pretrained)
    except RuntimeError as error:
        raise ValueError(f'{user}: {model_name!r}: {error}') from error


def transformers_model(
    auto: str, model_name: str, pretrained: bool, config: Mapping[str, Any] | None, user: str
) -> Any:
    """A model of the transformers library, found by one of its classes (``'AutoModel'``).

    Its weights are in float32 whatever its file holds, unless ``config`` has a ``dtype``: in half
    precision small updates would be lost, and from version 5 on the library takes the file's.
    """
    transformers = import_optional('transformers', user)
    kind, options = getattr(transformers, auto), dict(config or {})
    try:
        if pretrained:
            options.setdefault('trust_remote_code', False)  # code in the model's folder
            if not options.keys() & {'dtype', 'torch_dtype'}:
                is_new = digit_version(transformers.__version__) >= digit_version('4.56')
                options['dtype' if is_new else 'torch_dtype'] = torch.float32
            with safe_loading(f'The pretrained file of {model_name}'):
                return kind.from_pretrained(model_name, **options)
        return kind.from_config(transformers.AutoConfig.for_model(model_name, **options))
    except (OSError, ValueError) as error:
        raise ValueError(f'{user}: {model_name!r}: {error}') from error


def transformers_encoder(
    model_name: str, pretrained: bool, config: Mapping[str, Any] | None, user: str
) -> Any:
    """An encoder of that library, without a pooler: DDP awaits a gradient from every parameter."""
    model = transformers_model('AutoModel', model_name, pretrained, config, user)
    if getattr(model, 'pooler', None) is not None:
        model.pooler = None
    return model


@MODELS.register_module()
class TransformersText(nn.Module):
    """A text encoder of the transformers library; its hidden states are averaged over the tokens.

    Args:
        model_name: Name on the hub or a folder, e.g. ``'bert-base-uncased'``. With
            ``pretrained=False`` and ``config`` only the kind of model: ``'bert'``.
        pretrained: Load the weights (needs the network or the library's cache).
        config: Entries of the model's configuration, e.g. ``dict(num_hidden_layers=2)``.
        pad_id: Token that fills a text up; by default the configuration's.

    Raises:
        ImportError: When transformers is missing.
        ValueError: For a model that it does not know.

    Attributes:
        num_features: Width D of the features.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = True,
        config: Mapping[str, Any] | None = None,
        pad_id: int | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = transformers_encoder(model_name, pretrained, config, 'TransformersText')
        self.num_features: int = self.model.config.hidden_size
        own = self.model.config.pad_token_id
        self.pad_id = pad_id if pad_id is not None else (own if own is not None else 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens Long[B, L] (of the model's own tokenizer) to features [B, D]."""
        padding = tokens == self.pad_id
        outputs = self.model(input_ids=tokens, attention_mask=(~padding).long())
        return mean_of_tokens(outputs.last_hidden_state, padding)
