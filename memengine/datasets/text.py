"""Plain text for language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memengine.datasets.image_dataset import positions
from memengine.registry import DATASETS
from memengine.suggest import import_optional


@DATASETS.register_module()
class TextBlocks(Dataset):
    """A text file as blocks of equally many tokens, one behind the other; the rest is left out.

    An item is ``dict(inputs=Long[L], data_samples=dict(index=int))``.

    Args:
        file: A text file in UTF-8.
        block_size: Tokens L of a block.
        tokenizer: Folder, or name on the hub, of a tokenizer of the transformers library, which
            should be the model's; None takes the bytes of the text as its tokens (0 to 255).
        indices: Which of the blocks to use: a list of positions, or a number for the first so
            many (negative: the last). Defaults to all.

    Raises:
        ImportError: When transformers is missing and a tokenizer is asked for.
        ValueError: For a missing file or tokenizer, a block of less than two tokens, or a text
            that does not fill one.

    Cost: the tokens of the whole file are kept, 4 bytes each.
    """

    def __init__(
        self,
        file: str,
        block_size: int = 1024,
        tokenizer: str | None = None,
        indices: int | Sequence[int] | None = None,
    ) -> None:
        if block_size < 2:
            raise ValueError(f'block_size must be at least 2 tokens, got {block_size}')
        if not Path(file).is_file():
            raise ValueError(f'there is no file {file!r}; set file to the text')
        try:
            text = Path(file).read_text(encoding='utf-8')
        except UnicodeDecodeError as error:
            raise ValueError(f'{file!r} is no text in UTF-8: {error}') from error
        tokens = list(text.encode()) if tokenizer is None else _tokenize(text, tokenizer)
        count = len(tokens) // block_size
        if not count:
            raise ValueError(
                f'{file!r} has {len(tokens)} tokens, which do not fill a block of {block_size}; '
                'lower block_size'
            )
        self._blocks = np.array(tokens[: count * block_size], np.int32).reshape(count, block_size)
        self._positions = positions(indices, count)
        self._file = file
        self.metainfo: dict[str, Any] = {'block_size': block_size}

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The block at ``index``."""
        tokens = torch.from_numpy(self._blocks[self._positions[index]]).long()
        return {'inputs': tokens, 'data_samples': {'index': index}}

    def sample_name(self, index: int) -> str:
        """What the sample is called in messages, with its file."""
        return f'block {self._positions[index]} of {self._file!r}'


def _tokenize(text: str, name: str) -> list[int]:
    library = import_optional('transformers', f'TextBlocks(tokenizer={name!r})')
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f'tokenizer={name!r}: {error}') from error
    # It would warn of a text that is longer than the model's input.
    return tokenizer(text, verbose=False)['input_ids']
