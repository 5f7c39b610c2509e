"""The moving average is of updates, however many iterations they take."""

import pytest
import torch
from mmengine.hooks import Hook

from memengine.engine.hooks import EMAHook
from tests.engine.toy import Losses, params, toy_runner


class Weights(Hook):
    """Keeps the weight after each iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.append(runner.model.net[0].weight.detach().clone())


OVERFLOWS = dict(precision='fp16', loss_scale=dict(init_scale=2.0**100, backoff_factor=2.0**-100))


@pytest.mark.parametrize(
    ('settings', 'updates', 'fused'),
    [
        (dict(), [0, 1, 2, 3, 4], False),
        (dict(accumulative_counts=2), [1, 3, 4], False),  # the last iteration updates by itself
        (OVERFLOWS, None, False),
        (OVERFLOWS, None, True),
    ],
    ids=['plain', 'accumulated', 'overflow', 'overflow of a fused optimiser'],
)
def test_the_average_is_of_updates(tmp_path, settings, updates, fused):
    weights = Weights()
    runner = toy_runner(
        tmp_path,
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.05, fused=fused), **settings),
        param_scheduler=None,
        default_hooks=dict(finite_loss=None) if fused else None,  # which would look beforehand
        custom_hooks=[weights, dict(type='EMAHook', momentum=0.25)],
    )
    runner.train()
    if updates is None:
        moved = zip(weights.seen, weights.seen[1:], strict=False)
        updates = [place for place, (a, b) in enumerate(moved, 1) if not torch.equal(a, b)]
        assert 0 < len(updates) < 5
    (ema,) = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
    expected = weights.seen[updates[0]]
    for place in updates[1:]:
        expected = 0.75 * expected + 0.25 * weights.seen[place]
    torch.testing.assert_close(ema.ema_model.module.net[0].weight, expected)
    assert int(ema.ema_model.steps) == len(updates)


@pytest.mark.parametrize('sharded', [False, True])
def test_a_run_that_goes_on_without_an_average_goes_on_from_its_weights(tmp_path, capfd, sharded):
    expected, losses = Losses(), Losses()
    checkpoint = dict(checkpoint=dict(interval=-1, sharded=sharded))
    whole = toy_runner(tmp_path / 'whole', expected)
    whole.train()
    toy_runner(
        tmp_path / 'parts',
        losses,
        dict(by_epoch=True, max_epochs=3, stop_at_iter=7),
        default_hooks={**checkpoint, 'ema': dict(type='EMAHook', momentum=0.25)},
    ).train()
    resumed = toy_runner(tmp_path / 'parts', losses, default_hooks=checkpoint, resume=True)
    resumed.train()
    assert 'has an average of the weights (EMAHook)' in ''.join(capfd.readouterr())
    assert losses.seen == expected.seen
    for name, value in params(resumed).items():
        assert torch.equal(value, params(whole)[name]), name


def test_a_roll_back_to_an_average_takes_the_weights(tmp_path):
    ema = dict(type='EMAHook', momentum=0.25)
    stop = dict(by_epoch=True, max_epochs=3, stop_at_iter=7)
    averaged = toy_runner(tmp_path, None, stop, default_hooks=dict(ema=ema))
    averaged.train()
    runner = toy_runner(tmp_path, None, stop, resume=True)
    runner.train()  # no further
    with torch.no_grad():
        for parameter in runner.model.parameters():
            parameter.zero_()
    assert runner.roll_back() == str(tmp_path / 'iter_7.pth')
    for name, value in params(runner).items():
        assert torch.equal(value, params(averaged)[name]), name
