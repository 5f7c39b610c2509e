"""Words predicted one after the other, from those before them and from an image.

Shapes: B texts of L tokens, N places of an image, W width, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memengine.registry import MODELS


@MODELS.register_module()
class CaptionHead(nn.Module):
    """A causal Transformer over a text's tokens, each of which looks at all of an image.

    Args:
        in_dim: Width of the image's places.
        vocab_size: Number of tokens, as the tokenizer has it.
        context_length: Most tokens of a text.
        width: Width W of the layers.
        depth: Number of layers.
        num_heads: Attention heads.
        pad_id: Token that fills a text up; the first one is its end, and is predicted, too.

    Raises:
        ValueError: When ``num_heads`` does not divide ``width``; for longer texts.

    Source: the multimodal decoder of Yu et al., CoCa: Contrastive Captioners are Image-Text
    Foundation Models (2022); here it has embeddings of its own, so that any text encoder can stand
    beside it.
    """

    def __init__(
        self,
        in_dim: int,
        vocab_size: int,
        context_length: int = 16,
        width: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        pad_id: int = 0,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(
                f'CaptionHead: num_heads must divide width={width}, got num_heads={num_heads}'
            )
        self.pad_id = pad_id
        self.places = nn.Linear(in_dim, width)
        self.tokens = nn.Embedding(vocab_size, width)
        self.start = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(context_length, width))
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(
                width, num_heads, 4 * width, 0.0, 'gelu', batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.words = nn.Linear(width, vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the embeddings of tokens, of their positions and of the start."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        nn.init.normal_(self.start, std=0.02)

    def logits(self, image: Tensor, tokens: Tensor) -> Tensor:
        """What follows the start, and each of the tokens.

        Args:
            image: [B, N, in_dim].
            tokens: Long[B, L - 1], those before the last.

        Returns:
            [B, L, V].
        """
        length = tokens.shape[1] + 1
        if length > len(self.positions):
            raise ValueError(
                f'CaptionHead: texts have {length} tokens, and context_length is '
                f'{len(self.positions)}'
            )
        places = self.places(image)  # [B, N, W]
        given = torch.cat([self.start.expand(len(tokens), -1, -1), self.tokens(tokens)], dim=1)
        hidden = given + self.positions[:length]  # [B, L, W]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, places, tgt_mask=later)
        return self.words(self.norm(hidden))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of each text's tokens, in nats.

        Args:
            image: [B, N, in_dim].
            tokens: Long[B, L].

        Returns:
            [B], in fp32 or wider.
        """
        logits = self.logits(image, tokens[:, :-1])  # [B, L, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.transpose(1, 2), tokens, reduction='none')  # [B, L]
        said = F.pad(tokens[:, :-1] != self.pad_id, (1, 0), value=True)
        return (losses * said).sum(dim=1) / said.sum(dim=1)

    @torch.no_grad()
    def captions(self, image: Tensor) -> Tensor:
        """The likeliest words one after the other, ``context_length`` of them.

        Args:
            image: [B, N, in_dim].

        Returns:
            Long[B, context_length]; after the first ``pad_id`` there is nothing else.
        """
        tokens = torch.empty(len(image), 0, dtype=torch.long, device=image.device)
        ended = torch.zeros(len(image), dtype=torch.bool, device=image.device)
        for _ in range(len(self.positions)):
            following = self.logits(image, tokens)[:, -1].argmax(dim=1)
            ended |= following == self.pad_id
            tokens = torch.cat([tokens, following.where(~ended, self.pad_id)[:, None]], dim=1)
        return tokens
