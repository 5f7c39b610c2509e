"""A small text encoder in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memengine.registry import MODELS


def mean_of_tokens(hidden: Tensor, padding: Tensor) -> Tensor:
    """Mean of hidden states [B, L, D] over the tokens that are no padding (bool [B, L]); [B, D]."""
    weight = (~padding).to(hidden.dtype)[..., None]  # [B, L, 1]
    return (hidden * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1)


@MODELS.register_module()
class TextTransformer(nn.Module):
    """A pre-norm Transformer over tokens, averaged to one feature per text.

    Args:
        vocab_size: Number of tokens, as the tokenizer has it (``WordTokenizer.vocab_size``).
        context_length: Most tokens of a text.
        width: Width D of the features.
        depth: Number of layers.
        num_heads: Attention heads.
        dropout: In every layer.
        pad_id: Token that fills a text up and is not looked at.

    Raises:
        ValueError: For texts that are longer, or no [B, L] of whole numbers.

    Attributes:
        num_features: Width D of the features.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int = 16,
        width: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        dropout: float = 0.0,
        pad_id: int = 0,
    ) -> None:
        super().__init__()
        if problem := self.config_problem({'width': width, 'num_heads': num_heads}):
            raise ValueError(f'TextTransformer: {problem[0]}: {problem[1]}')
        self.num_features = width
        self.pad_id = pad_id
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(context_length, width))
        self.reset_parameters()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 4 * width, dropout, 'gelu', batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    @staticmethod
    def config_problem(config: Mapping[str, Any]) -> tuple[str, str] | None:
        """A setting, and what is wrong with it, that no type says."""
        width, num_heads = config.get('width', 128), config.get('num_heads', 4)
        if width % num_heads:
            return 'num_heads', f'must divide width={width}, got {num_heads}'
        return None

    def reset_parameters(self) -> None:
        """Draw the embeddings of tokens and positions."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens Long[B, L] to features [B, D]."""
        longest = len(self.positions)
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] > longest:
            raise ValueError(
                f'TextTransformer: expected whole numbers [B, L] with L <= context_length='
                f'{longest}, got {tokens.dtype} {tuple(tokens.shape)}'
            )
        padding = tokens == self.pad_id  # [B, L]
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padding)
        return mean_of_tokens(self.norm(hidden), padding)
