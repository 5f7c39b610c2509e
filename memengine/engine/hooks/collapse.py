"""Warns when self-distillation collapses, which the loss does not tell."""

from __future__ import annotations

import math
from typing import Any

from mmengine.hooks import Hook

from memengine.registry import HOOKS

__all__ = ['CollapseHook']

_ADVICE = (
    "What helps, in the order to try: model.centering='sinkhorn'; model.head.use_bn=True; a lower "
    'model.momentum_teacher on small data; {specific}; a lower optim_wrapper.optimizer.lr or a '
    'longer warm-up. A falling loss means nothing until this is gone.'
)


@HOOKS.register_module()
class CollapseHook(Hook):
    """Warns when the teacher says the same of every image.

    Three signs are watched, each as far as the model logs it:

    * ``teacher_entropy``, of the mean teacher output, near 0: all images get one prototype;
    * ``teacher_sample_entropy``, the mean over images, near log(out_dim): all images get the
      uniform output. (The entropy of the *mean* is near log(out_dim) in good training too, where
      all prototypes are used alike, so it says nothing of this kind.)
    * ``feature_std``, the spread of the normalised features, near 0: all features are alike.

    One warning is given per episode, again only after the sign had gone.

    Args:
        min_entropy: Lowest good ``teacher_entropy``, as a fraction of log(out_dim). A batch of B
            images cannot exceed log(2 * B), so tiny batches with many prototypes need less.
        max_entropy: Highest good ``teacher_sample_entropy``, as a fraction of log(out_dim).
        min_feature_std: Lowest good ``feature_std``.
        out_dim: Number of prototypes; by default the config's ``model.head.out_dim``.
        interval: Iterations between two checks; the mean over them is checked.
        patience: Checks in a row that have to be bad.

    Raises:
        ValueError: For settings out of range, or when the model logs none of the signs.
    """

    priority = 'NORMAL'

    def __init__(
        self,
        min_entropy: float = 0.1,
        max_entropy: float = 0.99,
        min_feature_std: float = 0.05,
        out_dim: int | None = None,
        interval: int = 50,
        patience: int = 3,
    ) -> None:
        if not 0 <= min_entropy < max_entropy <= 1:
            raise ValueError(
                'CollapseHook: 0 <= min_entropy < max_entropy <= 1 must hold (fractions of '
                f'log(out_dim)), got min_entropy={min_entropy} and max_entropy={max_entropy}'
            )
        for name, value in (('interval', interval), ('patience', patience)):
            if value < 1:
                raise ValueError(f'CollapseHook: {name} must be at least 1, got {value}')
        self.min_entropy = min_entropy
        self.max_entropy = max_entropy
        self.min_feature_std = min_feature_std
        self.out_dim = out_dim
        self.interval = interval
        self.patience = patience
        self._bad_checks: dict[str, int] = {}

    def before_train(self, runner: Any) -> None:
        """Find out how many prototypes there are."""
        if self.out_dim is None:
            self.out_dim = runner.cfg.get('model', {}).get('head', {}).get('out_dim')

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Look at the signs now and then."""
        if not self.every_n_train_iters(runner, self.interval):
            return
        signs = ('teacher_entropy', 'teacher_sample_entropy', 'feature_std')
        logged = runner.message_hub.log_scalars
        values = {
            s: logged[f'train/{s}'].mean(self.interval) for s in signs if f'train/{s}' in logged
        }
        if not values:
            raise ValueError(
                f'CollapseHook: the model logs none of {", ".join(signs)}, so there is nothing to '
                'watch; return one of them beside the loss, or remove the hook'
            )
        for sign, value in values.items():
            complaint = self._complaint(sign, float(value))
            self._bad_checks[sign] = self._bad_checks.get(sign, 0) + 1 if complaint else 0
            if self._bad_checks[sign] == self.patience:
                runner.logger.warning(f'Collapse at iteration {runner.iter + 1}: {complaint}')

    def _complaint(self, sign: str, value: float) -> str | None:
        """What is wrong with a value, or None."""
        if sign == 'feature_std':
            if value >= self.min_feature_std:
                return None
            advice = _ADVICE.format(specific='a higher model.teacher_temp')
            return (
                f'the features of all images are alike (feature_std {value:.3g}, below '
                f'min_feature_std={self.min_feature_std}). {advice}'
            )
        if self.out_dim is None:
            raise ValueError(
                f'CollapseHook: to judge {sign}, set out_dim to the number of prototypes (it is '
                'not in the config as model.head.out_dim)'
            )
        fraction = value / math.log(self.out_dim)
        shown = f'{sign} {value:.3g} is {fraction:.3g} of log({self.out_dim})'
        if sign == 'teacher_entropy' and fraction < self.min_entropy:
            advice = _ADVICE.format(
                specific='a higher model.teacher_temp or lower model.center_momentum'
            )
            return (
                'the teacher gives all images the same prototype '
                f'({shown}, below min_entropy={self.min_entropy}). {advice}'
            )
        if sign == 'teacher_sample_entropy' and fraction > self.max_entropy:
            advice = _ADVICE.format(specific='a lower model.teacher_temp')
            return (
                'the teacher gives all images the uniform output '
                f'({shown}, above max_entropy={self.max_entropy}). {advice}'
            )
        return None
