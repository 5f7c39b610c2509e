"""The collapse hook warns of what the loss does not tell, once per episode."""

import logging
import math
import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from memengine.engine import Runner
from memengine.engine.config.file import load_config
from memengine.engine.hooks import CollapseHook
from memengine.engine.hooks.collapse import CollapseError
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


HEALTHY = {  # as digits are in the middle of training; a batch of 8 images allows log(8) = 2.08
    'teacher_entropy': math.log(K),
    'teacher_sample_entropy': math.log(K) - 1.4,
    'feature_std': 0.3,
    'feature_rank': 1.7,
}


def test_no_warning_in_good_training(tmp_path):
    assert warnings_of(tmp_path, lambda i: HEALTHY) == []


@pytest.mark.fault(
    'what is learned collapses, while the loss falls',
    'a warning names the figure, its bound and what helps; training may end (`stop=True`)',
    'teacher’s information, spread and rank of the features',
)
@pytest.mark.parametrize(
    ('bad', 'text'),
    [
        (  # all images get one of a few prototypes
            {'teacher_entropy': 1.3, 'teacher_sample_entropy': 0.95},
            r'much the same output.*0\.35 nats.*min_information=0\.2 of the possible 2\.08',
        ),
        (  # all images get the uniform output
            {'teacher_entropy': math.log(K), 'teacher_sample_entropy': math.log(K) - 0.1},
            r'a blurred output.*0\.1 nats.*a lower model\.teacher_temp',
        ),
        ({'feature_std': 0.01}, r'features of all images are alike \(feature_std 0\.01'),
        ({'feature_rank': 1.03}, r'too few dimensions \(feature_rank 1\.03.*min_feature_rank=1\.1'),
    ],
)
def test_each_sign_is_warned_of_once_and_after_patience(tmp_path, bad, text):
    (warning,) = warnings_of(tmp_path, lambda i: {**HEALTHY, **bad})
    assert warning[0] == 4  # the second check
    assert re.search(text, warning[1])
    assert "model.centering='sinkhorn'" in warning[1]


def test_few_prototypes_allow_less_information(tmp_path):
    """Of two prototypes log(2) = 0.69 can be told: a fifth of that is 0.14."""
    signs = {'teacher_entropy': 0.69, 'teacher_sample_entropy': 0.44}
    assert warnings_of(tmp_path, lambda i: signs, out_dim=2) == []
    assert len(warnings_of(tmp_path, lambda i: signs, out_dim=None)) == 1


@pytest.mark.parametrize(('fraction', 'warned'), [(0.05, 1), (0.15, 0)])
def test_entropy_of_the_mean_alone(tmp_path, fraction, warned):
    signs = {'teacher_entropy': fraction * math.log(K)}
    warnings = warnings_of(tmp_path, lambda i: signs)
    assert len(warnings) == warned
    assert all('the same prototype' in text for _, text in warnings)


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


def test_two_images_always_lie_on_a_line(tmp_path):
    hook, line = CollapseHook(), {'feature_rank': 1.0}
    assert hook._collapse_warnings(line, images=2) == {}
    assert hook._collapse_warnings(line, images=3)['rank']


def test_bounds_are_settings(tmp_path):
    signs = {'teacher_entropy': 1.0, 'teacher_sample_entropy': 0.9, 'feature_std': 0.03}
    signs['feature_rank'] = 1.05
    calm = dict(min_information=0.01, min_feature_std=0.02, min_feature_rank=1)
    assert warnings_of(tmp_path, lambda i: signs, **calm) == []


def test_prototypes_are_read_from_the_config(tmp_path):
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
        (dict(min_entropy=1.5), r'min_entropy is a fraction in \[0, 1\], got 1.5'),
        (dict(min_information=-1), 'min_information is a fraction'),
        (dict(patience=0), 'patience must be at least 1'),
        (dict(interval=0), 'interval must be at least 1'),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        CollapseHook(**settings)


def test_a_collapse_may_end_training(tmp_path):
    alike = {**HEALTHY, 'feature_std': 0.001}
    with pytest.raises(CollapseError, match=r'iteration 4: the features .*feature_std 0\.001'):
        warnings_of(tmp_path, lambda i: alike, stop=True)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['dino_vit', 'simclr_vit', 'clip_vit'])
def test_quick_starts_are_healthy_from_the_start(tmp_path, name):
    """Checked ten times as often as by default."""
    cfg = load_config(Path(__file__).parents[3] / f'configs/{name}.py')
    cfg.custom_hooks = [dict(type='CollapseHook', interval=10, patience=1, stop=True)]
    cfg.merge_from_dict({'train_cfg.max_epochs': 3, 'train_cfg.val_begin': 4})
    cfg.merge_from_dict({'work_dir': str(tmp_path), 'experiment_name': name})
    Runner.from_cfg(cfg).train()
