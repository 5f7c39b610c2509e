"""Self-contrastive loss: a network's output against those of its own sub-networks.

Shapes: B samples, n outputs of each (sub-networks G first, the backbone's F last), D features.
"""

from __future__ import annotations

from torch import Tensor

from memengine.losses.batch_loss import Products
from memengine.losses.supcon import SupConLoss, check_positives, given_positives, views_first


class ConLoss(SupConLoss):
    """Self-contrastive (SelfCon) loss: SupCon's loss over the outputs of a multi-exit network.

    Every output of every sample is an anchor and a contrast, as views are in
    :class:`~memengine.losses.supcon.SupConLoss`; the options of the call restrict the anchors.
    An anchor without positives adds 0 to the mean and counts in it (unless ``supcon_s``).

    Args:
        temperature: Of the similarities.
        contrast_mode: ``'all'`` outputs are anchors, or ``'one'``: the first of each sample only.
        base_temperature: The loss is in units of ``temperature / base_temperature``.
        tile_size: See :class:`~memengine.losses.batch_loss.BatchLoss`, also for the loss over
            several ranks.
        precision: See there, too.

    Raises:
        ValueError: For a temperature that is not positive or an unknown mode.

    Cost: as SupConLoss, for N = B * n contrasts and M anchors.

    Source: Bae et al., Self-Contrastive Learning (2021).
    """

    def forward(
        self,
        features: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        supcon_s: bool = False,
        selfcon_s_FG: bool = False,  # noqa: N803 (the names that callers use)
        selfcon_m_FG: bool = False,  # noqa: N803
    ) -> Tensor:
        """The batch's loss.

        Args:
            features: Embeddings [B, n, D], the backbone's own output last, as a rule
                l2-normalised; further dimensions are flattened into D.
            labels: [B]; equal labels are positives. Without labels and mask a sample's positives
                are its own other outputs.
            mask: [B, B]; ``mask[i, j]`` true (or its weight) where sample j is a positive of i.
                Over ranks, this rank's rows of it: [B, all B].
            supcon_s: The mean is over the anchors that have positives (SupCon with a single
                view, where a label can occur once); 0 if none has.
            selfcon_s_FG: Only the sub-networks' outputs are anchors: the gradient of a pair of
                backbone and sub-network does not come from the backbone's side as anchor.
            selfcon_m_FG: The same for two views, given as features [2B, n, D] =
                ``cat([view 1, view 2])`` with labels [B] or mask [B, B]: all outputs of both
                views are contrasts.

        Returns:
            Scalar, in fp32 or wider.

        Raises:
            ValueError: For another shape, both labels and mask, both ``FG`` options, or an
                ``FG`` option with a single output or ``contrast_mode='one'``; with ranks on all
                of them, also if only one is given such.
        """
        fg_only = selfcon_s_FG or selfcon_m_FG
        options = self.contrast_mode, supcon_s, selfcon_s_FG, selfcon_m_FG
        given = given_positives(labels, mask)
        with self.checked_by_all(features, options=options, positives=given):
            products = Products.of(self.precision, features)
            views = views_first(features, products)  # [n, B, D]
            if fg_only:
                self._check_anchors(features, selfcon_s_FG, selfcon_m_FG)
            batch_size = len(features) // (2 if selfcon_m_FG else 1)
            check_positives(batch_size, labels, mask)
        anchors = 1 if self.contrast_mode == 'one' else len(views) - fg_only
        positives = batch_size, labels, mask
        return self._mean(views, anchors, positives, products, of_positives=supcon_s)

    def _check_anchors(self, features: Tensor, single: bool, multi: bool) -> None:
        name = 'selfcon_s_FG' if single else 'selfcon_m_FG'
        if single and multi:
            raise ValueError('give selfcon_s_FG (one view) or selfcon_m_FG (two views), not both')
        if features.shape[1] < 2:
            raise ValueError(
                f'{name} takes its anchors from sub-networks, but features '
                f'{tuple(features.shape)} hold one output per sample; stack the '
                "sub-networks' outputs before the backbone's in dimension 1"
            )
        if self.contrast_mode == 'one':
            raise ValueError(f"{name} chooses the anchors itself; it needs contrast_mode='all'")
        if multi and features.shape[0] % 2:
            raise ValueError(
                f'selfcon_m_FG needs two views, features [2B, n, D], got {tuple(features.shape)}'
            )
