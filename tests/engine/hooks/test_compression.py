"""Recomputed, dropped, quantised activations from a config: keys, hooks, bases, schedules."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.runner import Runner as PlainRunner

from memengine.engine.hooks import DropITHook, QuantizedActivationsHook
from memengine.testing import relative_error
from tests.engine.hooks.images import Images, loader
from tests.engine.hooks.test_model_techniques import Network, base, train


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    return train(tmp_path_factory.mktemp('plain'))


def flat(state):
    return torch.cat([value.double().flatten() for value in state.values()])


SMALL = dict(min_numel=1)
WAYS = {
    'key': (dict(dropit=dict(gamma=0.5)), 'dropit', 0.9),
    'key as it is': (dict(dropit=True), 'dropit', 0.8),
    'blocks of a layer': (dict(dropit=['blocks']), 'dropit', 0.8),
    'hook': (dict(hooks=[DropITHook('random', 0.5)]), 'dropit', 0.9),
    'hook by name': (dict(hooks=[dict(type='DropITHook', value_bits=8)]), 'dropit', 0.8),
    'base config': (base('dropit'), 'dropit', 0.8),
    '8 bits': (dict(quantized_activations=SMALL), 'quantized_activations', 0.35),
    'base config, 8 bits': (
        dict(quantized_activations=base('quantized_activations')['quantized_activations'] | SMALL),
        'quantized_activations',
        0.35,
    ),
    'GACT': (dict(quantized_activations=dict(level='L1', **SMALL)), 'quantized_activations', 0.25),
    'Mesa': (
        dict(hooks=[QuantizedActivationsHook(ranges='running', **SMALL)]),
        'quantized_activations',
        0.6,  # ranges by channel, of 128 channels in 16 samples
    ),
    'DropIT and 4 bits': (
        dict(dropit=dict(value_bits=8), quantized_activations=dict(bits=4, **SMALL)),
        'quantized_activations',
        0.25,
    ),
}


@pytest.mark.parametrize('way', WAYS)
def test_training_keeps_less_and_goes_nearly_the_same_way(way, expected, tmp_path):
    settings, setting, share = WAYS[way]
    settings = dict(settings)
    state, kept = train(tmp_path, *settings.pop('hooks', ()), **settings)
    assert len(kept) == 6
    assert max(kept) < share * max(expected[1])
    assert 0 < relative_error(flat(state), flat(expected[0])) < 0.2
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert f'{setting}: ' in log and 'MiB in the first iteration, in ' in log


@pytest.mark.parametrize(
    'settings',
    [
        dict(recomputed_activations=['blocks']),
        dict(hooks=[dict(type='RecomputedActivationsHook', exclude=['head'])]),
        base('recomputed_activations'),
    ],
    ids=['key', 'hook by name', 'base config'],
)
def test_recomputing_goes_the_very_same_way(settings, expected, tmp_path):
    settings = dict(settings)
    state, kept = train(tmp_path, *settings.pop('hooks', ()), **settings)
    assert len(kept) == 6
    assert max(kept) < 0.8 * max(expected[1])
    assert all(torch.equal(state[name], expected[0][name]) for name in state)
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'recomputed_activations: ' in log and 'MiB in the first iteration, in ' in log


def test_gamma_follows_the_schedule(tmp_path):
    seen = []

    class Watched(DropITHook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            super().after_train_iter(runner, batch_idx, data_batch, outputs)
            seen.append(self._handle.gamma)

    train(tmp_path, Watched(schedule=[(1, 0.2), (3, 0.8)]))
    assert seen == pytest.approx([0.2, 0.2, 0.5, 0.8, 0.8, 0.8])


def test_a_schedule_that_starts_at_zero_is_no_error(tmp_path, expected):
    state, _ = train(tmp_path, DropITHook(schedule=[(0, 0.0), (100, 0.0)]))
    assert all(torch.equal(state[name], expected[0][name]) for name in state)


def test_bits_are_allotted_before_the_first_iteration_and_again(tmp_path):
    hook = QuantizedActivationsHook(level='L2.1', allot_every=3, min_numel=1)
    _, kept = train(tmp_path, hook)
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('3 bits on average: ') == 2
    assert len(kept) > 6  # forwards that measured


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(dropit=['unused']), 'dropit: the first iteration saved nothing that can be'),
        (dict(dropit=dict(modules='bloks')), "dropit: .* did you mean 'blocks'"),
        (dict(dropit=dict(schedule=[(5, 0.1), (2, 0.2)])), 'schedule is pairs .* in order'),
        (dict(dropit=dict(schedule=[(0, 1.5)])), 'schedule: gamma is from 0 to below 1'),
        (dict(dropit=dict(block_size=64)), "block_size: only strategy='block_mink' has blocks"),
        (dict(dropit=dict(value_bits=3)), 'value_bits is 32, 16, 8, 4 or 2, got 3'),
        (dict(quantized_activations=dict(level='L4')), 'level is one of L1, L1.1'),
        (dict(quantized_activations=dict(modules='unused')), 'saved nothing that can be'),
        (dict(quantized_activations=dict(allot_every=2)), 'allot_every=2 has nothing to allot'),
        (
            dict(quantized_activations=dict(level='L2', ranges='running')),
            "ranges='running' works at 8 bits",
        ),
        (dict(dropit=dict(modules='unused', schedule=[(0, 0.0), (2, 0.9)])), 'saved nothing that'),
        (dict(dropit=True, compile=True), 'compile and dropit do not go together'),
        (dict(recomputed_activations=['unused']), 'saved nothing that can be'),
        (dict(recomputed_activations=True, compile=True), 'compile and recomputed_activations do'),
        (
            dict(quantized_activations=True, compile_blocks=True),
            'compile_blocks and quantized_activations do not go together',
        ),
    ],
)
def test_what_does_nothing_or_cannot_be_is_an_error(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **settings)


@pytest.mark.parametrize('by_mmengine', [True, False])
@pytest.mark.parametrize(('average', 'is_kept'), [(4, True), (2, False), (None, False)])
def test_a_resumed_run_goes_on_from_its_bits_unless_others_are_asked_for(
    average, is_kept, by_mmengine
):
    bits = {('blocks.0.one', 'linear'): 2}
    checkpoint = {'techniques': {'quantized_activations': {'bits': bits, 'average_bits': 4}}}
    hook = QuantizedActivationsHook(average_bits=average, min_numel=1)
    run = SimpleNamespace(model=Network(), hooks=[hook], _resume=True)
    if not by_mmengine:  # whose runner loads before the hook has begun
        hook.before_train(run)
    hook.after_load_checkpoint(run, checkpoint)
    hook.before_train(run)
    assert hook.handle.bits_of == (bits if is_kept else {})


def test_plain_runner_of_mmengine_takes_the_hooks(tmp_path):
    run = PlainRunner(
        Network(),
        str(tmp_path),
        train_dataloader=loader(Images()),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        custom_hooks=[DropITHook(gamma=0.5), QuantizedActivationsHook(min_numel=1)],
        experiment_name='compression_plain',
    )
    run.train()
    assert all('forward' not in vars(module) for module in run.model.modules())
