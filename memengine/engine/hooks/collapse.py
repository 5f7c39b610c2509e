"""Warns of a collapse of what is learned, or ends training, as the loss does not tell."""

from __future__ import annotations

import math
from typing import Any

from mmengine.hooks import Hook

from memengine.engine.hooks.batches import count_images
from memengine.registry import HOOKS

_SIGNS = ('teacher_entropy', 'teacher_sample_entropy', 'feature_std', 'feature_rank')

_ADVICE = (
    "What helps, in the order to try: model.centering='sinkhorn'; model.head.use_bn=True; a lower "
    'model.momentum_teacher on small data; {temperature} model.teacher_temp; a lower '
    'optim_wrapper.optimizer.lr or a longer warm-up. A falling loss means nothing until this is '
    'gone.'
)


class CollapseError(RuntimeError):
    """Training was to stop at a collapse, and there was one."""


@HOOKS.register_module()
class CollapseHook(Hook):
    """Warns when the teacher says the same of every image.

    Watched is what the model logs of

    * ``teacher_entropy``, of the mean teacher output, and ``teacher_sample_entropy``, the mean of
      the outputs' own: their difference is the information that an output has about its image.
      It vanishes both when all images get one prototype and when all get the uniform output, and
      cannot exceed log(B) for a batch of B images.
    * ``teacher_entropy`` without the other: near 0 when all images get one prototype. (The
      uniform output cannot be seen so: in good training all prototypes are used alike, too.)
    * ``feature_std``, the spread of the normalised features: near 0 when all are alike.
    * ``feature_rank``, the number of dimensions in which they are spread: 1 when all lie on a
      line, however far apart. Three images are needed to see more.

    One warning is given per episode, again only after the sign had gone.

    Args:
        min_information: Lowest good information, as a fraction of what a batch allows: log(B), or
            log(out_dim) where there are fewer prototypes.
        min_entropy: Lowest good ``teacher_entropy``, as a fraction of log(out_dim).
        min_feature_std: Lowest good ``feature_std``.
        min_feature_rank: Lowest good ``feature_rank``. What is good depends on data and stage
            (below 2 in the first epochs of good runs), so that the default is just above 1.
        out_dim: Number of prototypes; by default the config's ``model.head.out_dim``.
        interval: Iterations between two checks; the mean over them is checked.
        patience: Checks in a row that have to be bad.
        stop: Whether training ends instead of going on with a warning.

    Raises:
        ValueError: For settings out of range, or when the model logs none of the signs.
        CollapseError: At a collapse, with ``stop``; nothing is saved of the iteration.
    """

    priority = 'NORMAL'

    def __init__(
        self,
        min_information: float = 0.2,
        min_entropy: float = 0.1,
        min_feature_std: float = 0.05,
        min_feature_rank: float = 1.1,
        out_dim: int | None = None,
        interval: int = 50,
        patience: int = 2,
        stop: bool = False,
    ) -> None:
        for name, fraction in (('min_information', min_information), ('min_entropy', min_entropy)):
            if not 0 <= fraction <= 1:
                raise ValueError(f'CollapseHook: {name} is a fraction in [0, 1], got {fraction}')
        for name, value in (('interval', interval), ('patience', patience)):
            if value < 1:
                raise ValueError(f'CollapseHook: {name} must be at least 1, got {value}')
        self.min_information = min_information
        self.min_entropy = min_entropy
        self.min_feature_std = min_feature_std
        self.min_feature_rank = min_feature_rank
        self.out_dim = out_dim
        self.interval = interval
        self.patience = patience
        self.stop = stop
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
        logged = runner.message_hub.log_scalars
        signs = [name for name in _SIGNS if f'train/{name}' in logged]
        if not signs:
            raise ValueError(
                f'CollapseHook: the model logs none of {", ".join(_SIGNS)}, so there is nothing to '
                'watch; return one of them beside the loss, or remove the hook'
            )
        means = {name: float(logged[f'train/{name}'].mean(self.interval)) for name in signs}
        images = count_images(data_batch, runner.train_dataloader)
        for sign, warning in self._collapse_warnings(means, images).items():
            self._bad_checks[sign] = self._bad_checks.get(sign, 0) + 1 if warning else 0
            if self._bad_checks[sign] == self.patience:
                message = f'Collapse at iteration {runner.iter + 1}: {warning}'
                if self.stop:
                    raise CollapseError(message)
                runner.logger.warning(message)

    def _collapse_warnings(self, means: dict[str, float], images: int) -> dict[str, str | None]:
        """What is wrong, or None, by sign."""
        found: dict[str, str | None] = {}
        entropy = means.get('teacher_entropy')
        sample_entropy = means.get('teacher_sample_entropy')
        if entropy is not None and sample_entropy is not None:
            found['information'] = self._check_information(entropy, sample_entropy, images)
        elif entropy is not None:
            found['entropy'] = self._check_entropy(entropy)
        if 'feature_std' in means:
            found['spread'] = _check_least(
                'feature_std', means, self.min_feature_std, 'are alike', 'a higher'
            )
        if 'feature_rank' in means and images > 2:  # two images lie on a line
            what = 'lie in too few dimensions'
            found['rank'] = _check_least(
                'feature_rank', means, self.min_feature_rank, what, 'another'
            )
        return found

    def _check_information(self, entropy: float, sample_entropy: float, images: int) -> str | None:
        most = math.log(min(images, self.out_dim or images))
        if entropy - sample_entropy >= self.min_information * most:
            return None
        is_sharp = sample_entropy < most / 2
        return (
            f'the teacher gives all images {"much the same" if is_sharp else "a blurred"} output: '
            f'it tells {entropy - sample_entropy:.3g} nats about its image (teacher_entropy '
            f'{entropy:.3g} less teacher_sample_entropy {sample_entropy:.3g}), below '
            f'min_information={self.min_information} of the possible {most:.3g}. '
            + _ADVICE.format(temperature='a higher' if is_sharp else 'a lower')
        )

    def _check_entropy(self, entropy: float) -> str | None:
        if self.out_dim is None:
            raise ValueError(
                'CollapseHook: to judge teacher_entropy, set out_dim to the number of prototypes '
                '(it is not in the config as model.head.out_dim)'
            )
        if entropy >= self.min_entropy * math.log(self.out_dim):
            return None
        return (
            'the teacher gives all images the same prototype (teacher_entropy '
            f'{entropy:.3g}, below min_entropy={self.min_entropy} of log({self.out_dim})). '
            + _ADVICE.format(temperature='a higher')
        )


def _check_least(
    name: str, means: dict[str, float], least: float, what: str, temperature: str
) -> str | None:
    if means[name] >= least:
        return None
    finding = (
        f'the features of all images {what} ({name} {means[name]:.3g}, below min_{name}={least})'
    )
    return f'{finding}. {_ADVICE.format(temperature=temperature)}'
