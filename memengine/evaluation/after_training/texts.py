"""Texts through the text tower of an image-text model.

Shapes: T texts, L tokens each, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memengine.evaluation.knn import unit_rows
from memengine.registry import TRANSFORMS
from memengine.suggest import import_optional

_BATCH = 256
_SETS = {'openai': 'OPENAI_IMAGENET_TEMPLATES', 'simple': 'SIMPLE_IMAGENET_TEMPLATES'}


def check_has_texts(model: nn.Module, command: str) -> None:
    """Raise ValueError for a model without a text tower."""
    towers = dict(model.named_children()).get('towers')
    if not isinstance(towers, nn.ModuleDict) or 'text' not in towers:
        raise ValueError(
            f'memengine {command} wants a model of images and texts (CLIP, SigLIP), and this is a '
            f'{type(model).__name__}; memengine probe measures the features of any model'
        )


@torch.inference_mode()
def embed_texts(runner: Any, tokens: Tensor) -> Tensor:
    """Tokens Long[T, L] to embeddings of length 1, [T, D] on the CPU."""
    model = runner.model
    model.eval()
    parts = []
    for part in tokens.split(_BATCH):
        samples = {'tokens': part.to(next(model.parameters()).device)}
        parts.append(unit_rows(model.embed(None, samples)['text'].float()).cpu())
    return torch.cat(parts)


def tokenizer_of(cfg: Mapping[str, Any], config: Mapping[str, Any] | None, command: str) -> Any:
    """A tokenizer by its config, or that of the only ``Tokenize`` of the validation data."""
    if config is None:
        loader = cfg.get('val_dataloader') or cfg.get('test_dataloader')
        found = list(_tokenizers(loader))
        if not found or any(other != found[0] for other in found):
            raise ValueError(
                f'{command}.tokenizer: the pipeline of val_dataloader has '
                f'{"several" if found else "no"} Tokenize; name the tokenizer that the model was '
                "trained with, e.g. dict(type='OpenClipTokenizer')"
            )
        config = found[0]
    return TRANSFORMS.build(dict(config))


def _tokenizers(config: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(config, Mapping):
        if str(config.get('type')).rpartition('.')[2] == 'Tokenize':
            yield config['tokenizer']
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for value in config:
            yield from _tokenizers(value)


def lines_of(value: str | Sequence[str], setting: str) -> list[str]:
    """A list of texts, or the lines of a file."""
    if isinstance(value, str):
        if not Path(value).is_file():
            raise ValueError(f'{setting} must be a list of texts or a file of lines, got {value!r}')
        value = Path(value).read_text().splitlines()
    texts = [line.strip() for line in value if line.strip()]
    if not texts:
        raise ValueError(f'{setting} holds no text')
    return texts


def templates_of(value: str | Sequence[str], setting: str) -> list[str]:
    """Sentences with ``{}``: a list, the lines of a file, or a set of open_clip by its name.

    Raises:
        ImportError: When open_clip is missing.
        ValueError: For a sentence without ``{}``.
    """
    if isinstance(value, str) and value in _SETS:
        open_clip = import_optional('open_clip', f'{setting}={value!r}', 'open_clip_torch')
        return [fill('{}') for fill in getattr(open_clip, _SETS[value])]
    templates = lines_of(value, setting)
    for template in templates:
        if '{}' not in template:
            raise ValueError(f'{setting}: {{}} must stand in every template, got {template!r}')
    return templates
