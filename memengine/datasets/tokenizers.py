"""Tokenizers: a text to a fixed number of token ids.

A tokenizer is called with a text and returns a Long tensor [L].
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memengine.registry import TRANSFORMS
from memengine.suggest import import_optional


def _words(text: str) -> list[str]:
    """Runs of letters and digits of any script, in lower case; other characters one by one.

    So are Chinese, Japanese and Korean ones, which are written without spaces.
    """
    characters = unicodedata.normalize('NFC', text.lower())  # an accent may be a character, too
    return ''.join(c if _continues_word(c) else f' {c} ' for c in characters).split()


def _continues_word(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "'"
    is_of_word = unicodedata.category(character)[0] in 'LMN'  # letters, accents, numbers
    return is_of_word and unicodedata.east_asian_width(character) not in 'WF'


@TRANSFORMS.register_module()
class WordTokenizer:
    """One token for each word of a small, given vocabulary; case does not matter.

    A word is a run of letters and digits, of any script; each Chinese, Japanese or Korean character
    and each punctuation mark is one of its own.

    Ids: 0 fills up, 1 is any unknown word, 2 starts a text, 3 ends it, then the vocabulary in
    its order.

    Args:
        vocabulary: Words, and punctuation marks as words of their own.
        context_length: Tokens L of every text, with start and end; longer texts are cut off.

    Raises:
        ValueError: For an empty vocabulary, a word twice, an entry that is no single word, or
            ``context_length`` below 3.

    Attributes:
        vocab_size: Number of ids.
    """

    def __init__(self, vocabulary: Sequence[str], context_length: int = 16) -> None:
        if isinstance(vocabulary, str) or not vocabulary:
            raise ValueError(f'WordTokenizer: vocabulary must be a list of words, got {vocabulary}')
        if context_length < 3:
            raise ValueError(
                'WordTokenizer: context_length must be at least 3 (start, a word, end), got '
                f'{context_length}'
            )
        self.ids: dict[str, int] = {}
        for word in vocabulary:
            if len(words := _words(word)) != 1:
                raise ValueError(f'WordTokenizer: {word!r} in the vocabulary is no single word')
            if words[0] in self.ids:
                raise ValueError(f'WordTokenizer: {word!r} is in the vocabulary twice')
            self.ids[words[0]] = len(self.ids) + 4
        self.context_length = context_length
        self.vocab_size = len(self.ids) + 4

    def __call__(self, text: str) -> Tensor:
        """The text's tokens, Long[L]."""
        words = [self.ids.get(word, 1) for word in _words(text)]
        tokens = [2, *words[: self.context_length - 2], 3]
        return torch.tensor(tokens + [0] * (self.context_length - len(tokens)))


@TRANSFORMS.register_module()
class OpenClipTokenizer:
    """The tokenizer that belongs to an open_clip model.

    Args:
        model_name: As for the model, e.g. ``'ViT-B-32'``.

    Raises:
        ImportError: When open_clip is missing.
    """

    def __init__(self, model_name: str) -> None:
        open_clip = import_optional('open_clip', 'OpenClipTokenizer', 'open_clip_torch')
        self.tokenizer: Any = open_clip.get_tokenizer(model_name)

    def __call__(self, text: str) -> Tensor:
        """The text's tokens, Long[L]."""
        return self.tokenizer([text])[0]


@TRANSFORMS.register_module()
class TransformersTokenizer:
    """The tokenizer of a model of the transformers library.

    Args:
        model_name: Name on the hub or a folder, e.g. ``'bert-base-uncased'``.
        context_length: Tokens L of every text; longer texts are cut off.

    Raises:
        ImportError: When transformers is missing.
        ValueError: For a name that is not found, files that are damaged, or a tokenizer without
            padding.
    """

    def __init__(self, model_name: str, context_length: int = 77) -> None:
        kind = import_optional('transformers', 'TransformersTokenizer').AutoTokenizer
        try:
            self.tokenizer: Any = kind.from_pretrained(model_name, trust_remote_code=False)
        except Exception as error:  # of any kind: its files may say anything
            raise ValueError(f'TransformersTokenizer: {model_name!r}: {error}') from error
        if self.tokenizer.pad_token is None:
            raise ValueError(f'TransformersTokenizer: {model_name!r} has no padding token')
        self.context_length = context_length

    def __call__(self, text: str) -> Tensor:
        """The text's tokens, Long[L]."""
        encoded = self.tokenizer(
            text,
            padding='max_length',
            truncation=True,
            max_length=self.context_length,
            return_tensors='pt',
        )
        return encoded['input_ids'][0]
