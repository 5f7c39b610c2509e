"""The loss of SigLIP: every image-text pair is a binary classification of its own.

Shapes: B image-text pairs, D features.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from memengine.losses.clip import check_towers, pairwise_logits
from memengine.techniques.precision import autocast_off

__all__ = ['SigLipLoss', 'sigmoid_loss']


def sigmoid_loss(logits: Tensor) -> Tensor:
    """``-sum log sigmoid(z * logits) / B`` for [B, B], z = 1 on the diagonal and -1 elsewhere.

    Args:
        logits: Square, the true pairs on its diagonal.

    Returns:
        Scalar.
    """
    margins = logits.neg()
    margins.diagonal().neg_()
    return -F.logsigmoid(margins).sum() / len(logits)


class SigLipLoss(nn.Module):
    """Pairwise sigmoid loss between paired images and texts.

    Takes open_clip's call. The loss is this process's own batch's.

    Cost: 2B²D FLOPs forward and 4B²D backward; autograd keeps the [B, B] margins, on CPU also
    their exponentials.

    Half-precision features are computed with in fp32, also under autocast.

    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training (2023).
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The batch's loss.

        Args:
            image_features: [B, D], as a rule l2-normalised.
            text_features: [B, D], row i belongs to image i.
            logit_scale: Scalar factor of the similarities, already exponentiated; gets its
                gradient.
            logit_bias: Scalar added to every logit (about -10 at the start of training); gets
                its gradient.
            output_dict: Return ``{'contrastive_loss': loss}`` instead.

        Returns:
            Scalar, in fp32 or wider: the sum over all pairs divided by B.

        Raises:
            ValueError: For other shapes.
        """
        check_towers('SigLipLoss', image_features, text_features)
        with autocast_off(image_features.device.type):
            logits = pairwise_logits(image_features, text_features, logit_scale)
            if logit_bias is not None:
                logits = logits + logit_bias
            loss = sigmoid_loss(logits)
        return {'contrastive_loss': loss} if output_dict else loss
