"""The collapse hook warns of what the loss does not tell, once per episode."""

import logging
import math

import pytest
import torch

from memengine.engine.hooks import CollapseHook
from tests.engine.hooks.images import Classifier, image_runner

K = 256


class Logs(Classifier):
    """Logs what a function of the iteration says; six iterations an epoch."""

    def __init__(self, signs):
        super().__init__()
        self.signs, self.iteration = signs, 0

    def forward(self, inputs, data_samples=None, mode='tensor'):
        out = super().forward(inputs, data_samples, mode)
        if mode == 'loss':
            out.update({name: torch.tensor(v) for name, v in self.signs(self.iteration).items()})
            self.iteration += 1
        return out


def warnings_of(tmp_path, signs, epochs=2, cfg=None, **settings):
    """The hook's warnings, as (iteration, text), with a check every two iterations."""
    seen = []

    class Catch(logging.Handler):
        def emit(self, record):
            if record.levelno == logging.WARNING and record.msg.startswith('Collapse'):
                seen.append(record.msg)

    hook = dict(type='CollapseHook', **{**dict(interval=2, patience=2, out_dim=K), **settings})
    no_validation = dict(val_dataloader=None, val_cfg=None, val_evaluator=None)
    options = {**no_validation, **({'cfg': cfg} if cfg else {})}
    runner = image_runner(tmp_path, hook, model=Logs(signs), epochs=epochs, **options)
    runner.logger.handlers.append(Catch())
    runner.train()
    return [(int(text.split(':')[0].split()[-1]), text) for text in seen]


HEALTHY = {
    'teacher_entropy': math.log(K),  # all prototypes are used: not the uniform collapse
    'teacher_sample_entropy': 0.3 * math.log(K),
    'feature_std': 0.8,
}


def test_no_warning_in_good_training(tmp_path):
    assert warnings_of(tmp_path, lambda i: HEALTHY) == []


@pytest.mark.parametrize(
    ('bad', 'text'),
    [
        ({'teacher_entropy': 0.05 * math.log(K)}, 'the same prototype.*below min_entropy=0.1'),
        ({'teacher_sample_entropy': 0.995 * math.log(K)}, 'uniform.*above max_entropy=0.99'),
        ({'feature_std': 0.01}, 'features of all images are alike.*feature_std 0.01'),
    ],
)
def test_each_sign_is_warned_of_once_and_after_patience(tmp_path, bad, text):
    (warning,) = warnings_of(tmp_path, lambda i: {**HEALTHY, **bad})
    assert warning[0] == 4  # the second check
    import re

    assert re.search(text, warning[1])
    assert "model.centering='sinkhorn'" in warning[1]


def test_a_model_may_log_one_sign_only(tmp_path):
    (warning,) = warnings_of(tmp_path, lambda i: {'feature_std': 0.0}, out_dim=None)
    assert 'feature_std 0' in warning[1]


def test_again_after_it_had_gone(tmp_path):
    """Bad in iterations 1-4, good in 5-6, bad from 7 on: two episodes."""
    warnings = warnings_of(
        tmp_path, lambda i: {'feature_std': 0.8 if i in (4, 5) else 0.01}, epochs=3
    )
    assert [iteration for iteration, _ in warnings] == [4, 10]


def test_one_bad_check_is_no_collapse(tmp_path):
    assert warnings_of(tmp_path, lambda i: {'feature_std': 0.01 if i in (2, 3) else 0.8}) == []


def test_the_mean_between_checks_is_judged(tmp_path):
    """Every second value is bad, the mean is not."""
    assert warnings_of(tmp_path, lambda i: {'feature_std': 0.01 + 0.5 * (i % 2)}) == []


def test_bounds_are_settings(tmp_path):
    signs = {**HEALTHY, 'teacher_entropy': 0.05 * math.log(K), 'feature_std': 0.03}
    calm = dict(min_entropy=0.01, min_feature_std=0.02)
    assert warnings_of(tmp_path, lambda i: signs, **calm) == []


def test_prototypes_are_read_from_the_config(tmp_path):
    from mmengine.config import Config

    signs = {'teacher_entropy': 0.2 * math.log(K)}
    cfg = Config({'model': {'head': {'out_dim': 2**40}}})
    (warning,) = warnings_of(tmp_path, lambda i: signs, out_dim=None, cfg=cfg)
    assert f'log({2**40})' in warning[1]
    with pytest.raises(ValueError, match='CollapseHook.*set out_dim'):
        warnings_of(tmp_path, lambda i: signs, out_dim=None)


def test_nothing_to_watch(tmp_path):
    with pytest.raises(ValueError, match='CollapseHook.*logs none of teacher_entropy'):
        warnings_of(tmp_path, lambda i: {})


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(min_entropy=0.9, max_entropy=0.5), 'min_entropy=0.9 and max_entropy=0.5'),
        (dict(patience=0), 'patience must be at least 1'),
        (dict(interval=0), 'interval must be at least 1'),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        CollapseHook(**settings)
