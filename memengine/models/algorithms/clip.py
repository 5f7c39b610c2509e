"""Image-text contrast: CLIP and SigLIP.

Shapes: B pairs of an image and a text, D width of the common space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memengine.losses.batch_loss import l2_normalize
from memengine.models.algorithms.base import Algorithm, spread
from memengine.models.batch_checks import check_one_view
from memengine.models.build import build_loss
from memengine.registry import MODELS, ModelConfig
from memengine.techniques.slices.slicing import Slice, cut_evenly, take

TOWERS = ('image', 'text')


class _Tower(nn.Module):
    """An encoder and its projection to the common space; a frozen one has no projection."""

    def __init__(self, backbone: Any, embed_dim: int, frozen: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection: nn.Module = nn.Identity()
        if not frozen:
            self.projection = nn.Linear(backbone.num_features, embed_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection."""
        if isinstance(self.projection, nn.Linear):
            nn.init.normal_(self.projection.weight, std=self.projection.in_features**-0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images or tokens [N, ...] to embeddings [N, D], not normalised."""
        return self.projection(self.backbone(inputs))


@MODELS.register_module()
class CLIP(Algorithm):
    """Two towers that learn to tell which text of the batch belongs to which image.

    A batch holds the images in ``inputs`` [B, C, H, W] and the texts in
    ``data_samples['tokens']`` Long[B, L] (see ``Tokenize``).

    Args:
        image: Config of the image encoder with ``num_features``, e.g. a ``TimmBackbone``.
        text: Config of the text encoder: ``TextTransformer``, ``OpenClipText``,
            ``TransformersText`` or one's own, from tokens [B, L] to features [B, width].
        embed_dim: Width D of the common space; None for the width of the frozen tower.
        frozen: Towers that are not trained: ``['image']`` is LiT. They stay in eval mode and have
            no projection, so that their features are the common space.
        loss: Config or name of a loss with open_clip's call.
        init_scale: Scale of the similarities at the start, the inverse of a temperature. It is
            learned, as ``logit_scale = log(scale)``.
        max_scale: Largest scale; it is clamped after each update.
        **kwargs: Of :class:`Algorithm`.

    Raises:
        ValueError: For an unknown tower, both towers frozen, a frozen tower whose features are
            not ``embed_dim`` wide, a scale out of range, or a batch without tokens.

    Logged beside the loss: ``logit_scale`` (exponentiated); ``feature_std``, the spread of the
    normalised image embeddings times sqrt(D), 1 when isotropic and 0 when all are alike;
    ``feature_rank``, the number of dimensions in which they are spread.

    Source: Radford et al., Learning Transferable Visual Models (2021); for frozen towers Zhai et
    al., LiT: Zero-Shot Transfer with Locked-image text Tuning (2022).
    """

    def __init__(
        self,
        image: ModelConfig,
        text: ModelConfig,
        embed_dim: int | None = None,
        frozen: Sequence[Literal['image', 'text']] = (),
        loss: ModelConfig | str = 'ClipLoss',
        init_scale: float = 1 / 0.07,
        max_scale: float = 100.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        name = type(self).__name__
        if not set(frozen) <= set(TOWERS) or isinstance(frozen, str):
            raise ValueError(f'{name}: frozen must be a list of {TOWERS}, got {frozen!r}')
        if not 0 < init_scale <= max_scale:
            raise ValueError(
                f'{name}: 0 < init_scale <= max_scale must hold, got {init_scale} and {max_scale}'
            )
        encoders = {'image': MODELS.build(image), 'text': MODELS.build(text)}
        width = self._common_width(encoders, embed_dim, set(frozen))
        self.towers = nn.ModuleDict(
            {key: _Tower(encoder, width, key in frozen) for key, encoder in encoders.items()}
        )
        for key in frozen:
            self.freeze(self.towers[key])
        self.logit_scale = nn.Parameter(torch.tensor(math.log(init_scale)))
        self.init_scale, self.max_scale = init_scale, max_scale
        self.loss = build_loss(loss)

    def reset_parameters(self) -> None:
        """Give the scale the value that it starts from."""
        nn.init.constant_(self.logit_scale, math.log(self.init_scale))

    def _common_width(
        self, encoders: dict[str, Any], embed_dim: int | None, frozen: set[str]
    ) -> int:
        name = type(self).__name__
        if len(frozen) == len(TOWERS):
            raise ValueError(f'{name}: both towers are frozen, so there is nothing to train')
        for tower in frozen:
            width = encoders[tower].num_features
            if embed_dim not in (None, width):
                raise ValueError(
                    f'{name}: the features of the frozen {tower} tower are {width} wide and are '
                    f'not projected; set embed_dim={width} or leave it out, got {embed_dim}'
                )
            return width
        if embed_dim is None or embed_dim < 1:
            raise ValueError(f'{name}: embed_dim must be at least 1, got {embed_dim}')
        return embed_dim

    def embed(self, inputs: Tensor | None, data_samples: Any = None) -> dict[str, Tensor]:
        """What is there of images and tokens to ``image`` and ``text`` [B, D], not normalised."""
        embeddings = {}
        if inputs is not None:
            embeddings['image'] = self.towers['image'](inputs)
        if isinstance(data_samples, Mapping) and 'tokens' in data_samples:
            embeddings['text'] = self.towers['text'](data_samples['tokens'])
        return embeddings

    def targets(self, inputs: Any, data_samples: Any = None, size: Any = None) -> None:
        """Nothing; the batch is checked here, once."""
        check_one_view(inputs, type(self).__name__)
        if not isinstance(data_samples, Mapping) or 'tokens' not in data_samples:
            raise ValueError(
                f"{type(self).__name__} needs data_samples['tokens'] [B, L]; end the pipeline with "
                "dict(type='Tokenize', ...) and dict(type='PackInputs', keys=['label', 'index', "
                "'tokens'])"
            )

    def embedding_loss(
        self, embeddings: dict[str, Tensor], targets: Any = None, data_samples: Any = None
    ) -> dict[str, Tensor]:
        """The loss of all pairs, the scale, the spread and the rank."""
        images, texts = (l2_normalize(embeddings[tower]) for tower in TOWERS)
        return {
            'loss': self.loss(images, texts, **self._logit_parameters()),
            **self._logit_scalars(),
            **spread(images),
        }

    def _logit_parameters(self) -> dict[str, Tensor]:
        return {'logit_scale': self.logit_scale.exp()}

    def _logit_scalars(self) -> dict[str, Tensor]:
        return {'logit_scale': self.logit_scale.detach().exp()}

    def slices(
        self, inputs: Tensor, data_samples: Any, size: int | Mapping[str, int]
    ) -> list[Slice]:
        """By tower, then by sample.

        Args:
            inputs: Images of the batch.
            data_samples: With the tokens of the batch.
            size: Most rows in a slice; a dict gives it for each tower: ``dict(image=, text=)``.
        """
        self.targets(inputs, data_samples)
        sizes = dict(size) if isinstance(size, Mapping) else dict.fromkeys(TOWERS, size)
        if set(sizes) != set(TOWERS):
            raise ValueError(
                f'the size of a slice must be a number or one for each of {TOWERS}, got {size!r}'
            )
        total = len(inputs)
        tokens = {'tokens': data_samples['tokens']}
        images = [
            Slice(inputs[rows.start : rows.stop], None, rows, total, 'image')
            for rows in cut_evenly(total, sizes['image'])
        ]
        texts = [
            Slice(None, take(tokens, rows), rows, total, 'text')
            for rows in cut_evenly(total, sizes['text'])
        ]
        return images + texts

    def tower(self, name: str | None) -> nn.Module:
        """The encoder of that name."""
        return self if name is None else self.towers[name]

    def features(self, inputs: Tensor) -> Tensor:
        """Normalised image embeddings [B, D]."""
        return l2_normalize(self.towers['image'](inputs))

    def predict(self, inputs: Any, data_samples: Any = None) -> list[dict[str, Tensor]]:
        """``feature`` [D] of each image, and ``text_feature`` [D] where it has a text."""
        towers = CLIP.embed(self, inputs, data_samples)
        embeddings = {key: l2_normalize(z) for key, z in towers.items()}
        names = {'image': 'feature', 'text': 'text_feature'}
        return [
            {names[key]: value[row] for key, value in embeddings.items()}
            for row in range(len(inputs))
        ]

    @torch.no_grad()
    def after_update(self) -> None:
        """Keep the scale at most ``max_scale``."""
        self.logit_scale.clamp_(max=math.log(self.max_scale))


@MODELS.register_module()
class SigLIP(CLIP):
    """CLIP with the sigmoid loss: every pair of image and text is matched or not, by itself.

    Args:
        init_bias: Added to every logit at the start; learned. For the others see :class:`CLIP`.

    Raises:
        ValueError: As :class:`CLIP`.

    Logged as for CLIP, and ``logit_bias``.

    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023).
    """

    def __init__(
        self,
        image: ModelConfig,
        text: ModelConfig,
        embed_dim: int | None = None,
        frozen: Sequence[Literal['image', 'text']] = (),
        loss: ModelConfig | str = 'SigLipLoss',
        init_scale: float = 10.0,
        init_bias: float = -10.0,
        max_scale: float = 100.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(image, text, embed_dim, frozen, loss, init_scale, max_scale, **kwargs)
        self.logit_bias = nn.Parameter(torch.tensor(float(init_bias)))
        self.init_bias = float(init_bias)

    def reset_parameters(self) -> None:
        """Give scale and bias the values that they start from."""
        super().reset_parameters()
        nn.init.constant_(self.logit_bias, self.init_bias)

    def _logit_parameters(self) -> dict[str, Tensor]:
        return {**super()._logit_parameters(), 'logit_bias': self.logit_bias}

    def _logit_scalars(self) -> dict[str, Tensor]:
        return {**super()._logit_scalars(), 'logit_bias': self.logit_bias.detach()}
