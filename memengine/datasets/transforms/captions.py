"""From a label or several texts to a caption, and from a caption to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from memengine.datasets import tokenizers  # noqa: F401 (registers them)
from memengine.datasets.build import build
from memengine.registry import TRANSFORMS, TransformConfig


@TRANSFORMS.register_module()
class LabelCaption:
    """Caption an image with the name of its class: ``results['caption']``.

    Args:
        names: What each class is called, in the order of the labels.
        templates: Sentences with ``{}`` where the name goes.
        choice: ``'random'`` draws a template for each sample, ``'index'`` takes them in turn by
            the sample's index, which is what validation wants.

    Raises:
        ValueError: For no name or template, a template without ``{}``, another ``choice``, or a
            label beyond the names.
    """

    def __init__(
        self,
        names: Sequence[str],
        templates: Sequence[str],
        choice: Literal['random', 'index'] = 'random',
    ) -> None:
        for setting, value in (('names', names), ('templates', templates)):
            if isinstance(value, str) or not value:
                raise ValueError(f'LabelCaption: {setting} must be a list of texts, got {value!r}')
        for template in templates:
            if template.count('{}') != 1:
                raise ValueError(
                    f'LabelCaption: {{}} must stand once in every template, got {template!r}'
                )
        if choice not in ('random', 'index'):
            raise ValueError(f"LabelCaption: choice must be 'random' or 'index', got {choice!r}")
        self.names = list(names)
        self.templates = list(templates)
        self.choice = choice

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Add the caption."""
        label, count = results['label'], len(self.templates)
        if not 0 <= label < len(self.names):
            raise ValueError(f'label {label} has none of the {len(self.names)} names')
        drawn = results['index'] if self.choice == 'index' else int(torch.randint(count, ()))
        results['caption'] = self.templates[drawn % count].format(self.names[label])
        return results


@TRANSFORMS.register_module()
class ChooseCaption:
    """Caption an image with one of the texts that its source has for it: ``results['caption']``.

    Args:
        choice: ``'random'`` draws one anew each time, ``'first'`` takes the first, which is what
            validation wants.

    Raises:
        ValueError: For another ``choice``, and on a sample without texts.
    """

    def __init__(self, choice: Literal['random', 'first'] = 'random') -> None:
        if choice not in ('random', 'first'):
            raise ValueError(f"ChooseCaption: choice must be 'random' or 'first', got {choice!r}")
        self.choice = choice

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Add the caption."""
        texts = results.get('captions')
        if not texts:
            raise ValueError(
                'ChooseCaption: the sample has no captions; its source must have some, as '
                'ImageTable(caption=...), CocoCaptions or Shards'
            )
        drawn = int(torch.randint(len(texts), ())) if self.choice == 'random' else 0
        results['caption'] = texts[drawn]
        return results


@TRANSFORMS.register_module()
class Tokenize:
    """Turn ``results['caption']`` into ``results['tokens']``, Long[L].

    Let ``PackInputs.keys`` hold ``'tokens'``.

    Args:
        tokenizer: Config of a tokenizer: ``WordTokenizer``, ``OpenClipTokenizer``,
            ``TransformersTokenizer`` or one's own, registered with TRANSFORMS.
    """

    def __init__(self, tokenizer: TransformConfig) -> None:
        self.tokenizer = build(TRANSFORMS, tokenizer, 'Tokenize.tokenizer')

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Add the tokens."""
        if 'caption' not in results:
            raise ValueError(
                'Tokenize: the sample has no caption; put ChooseCaption or LabelCaption, or a '
                "transform of your own that sets results['caption'], before it"
            )
        results['tokens'] = self.tokenizer(results['caption'])
        return results
