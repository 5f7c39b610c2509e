"""The loss of CLIP: image-text contrast in both directions.

Shapes: B image-text pairs, D features.
"""

from __future__ import annotations

from torch import Tensor, nn

from memengine.techniques.precision import at_least_fp32, autocast_off

__all__ = ['ClipLoss', 'check_towers', 'clip_loss', 'pairwise_logits']


def check_towers(name: str, image_features: Tensor, text_features: Tensor) -> None:
    """Raise ValueError unless both are [B, D] of the same pairs, B > 0."""
    shapes = tuple(image_features.shape), tuple(text_features.shape)
    if image_features.dim() != 2 or shapes[0] != shapes[1] or image_features.numel() == 0:
        raise ValueError(
            f'{name}: expected image_features and text_features [B, D] of the same pairs, '
            f'got {shapes[0]} and {shapes[1]}'
        )


def pairwise_logits(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float
) -> Tensor:
    """``logit_scale * image . text`` of all pairs, [B, B] in fp32 or wider, images in rows."""
    images, texts = at_least_fp32(image_features, text_features)
    return (logit_scale * images).to(images.dtype) @ texts.T


def clip_loss(logits: Tensor) -> Tensor:
    """Symmetric cross-entropy of square logits [B, B] whose diagonal holds the true pairs.

    One matrix serves both directions: rows are images choosing a text, columns texts choosing
    an image.

    Returns:
        Scalar.
    """
    images_to_texts = logits.logsumexp(dim=1)  # [B]
    texts_to_images = logits.logsumexp(dim=0)  # [B]
    return ((images_to_texts + texts_to_images) / 2 - logits.diagonal()).mean()


class ClipLoss(nn.Module):
    """Symmetric InfoNCE between paired images and texts.

    Takes open_clip's call. The loss is this process's own batch's.

    Cost: 2B²D FLOPs forward and 4B²D backward; autograd keeps one [B, B] matrix (4B² bytes).

    Half-precision features are computed with in fp32, also under autocast; right at any scale
    (a temperature of 0.01 is a scale of 100).

    Source: Radford et al., Learning Transferable Visual Models (2021), figure 3.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The batch's loss.

        Args:
            image_features: [B, D], as a rule l2-normalised.
            text_features: [B, D], row i belongs to image i.
            logit_scale: Scalar factor of the similarities, already exponentiated
                (``model.logit_scale.exp()``); gets its gradient.
            output_dict: Return ``{'contrastive_loss': loss}`` instead.

        Returns:
            Scalar, in fp32 or wider.

        Raises:
            ValueError: For other shapes.
        """
        check_towers('ClipLoss', image_features, text_features)
        with autocast_off(image_features.device.type):
            loss = clip_loss(pairwise_logits(image_features, text_features, logit_scale))
        return {'contrastive_loss': loss} if output_dict else loss
