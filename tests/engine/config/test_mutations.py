"""What people get wrong in a config is named before anything is built, or harms nothing."""

import re
from collections import Counter

import pytest

from memengine.engine.config.check import ConfigError
from tests.engine.config.mutations import REMOVED, mutations

COUNT = 1000

# Why a mutation that passes is no mistake, or none that a check without building can see.
HARMLESS = {
    'an entry that may be left out: its default is taken': lambda m: (
        m.value is REMOVED and m.kind == 'removed'
    ),
    'None switches off, or stands for the default': lambda m: m.value is None,
    'zero is in its range': lambda m: m.kind == 'range' and m.value == 0,
    '-1 keeps all, or writes none; and counts stages from the end': lambda m: (
        re.search(r'(checkpoint\.(interval|max_keep_ckpts)|exits\.\d+)$', m.path)
        and m.value in (-1, -3)
    ),
    'a mean may be negative, and a threshold is any value of a pixel': lambda m: re.search(
        r'(mean\.\d+|threshold)$', m.path
    ),
    'no clipping is what an infinite norm says': lambda m: (
        m.path.endswith('max_norm') and m.value == float('inf')
    ),
    'another number or list that the setting takes': lambda m: (
        re.search(
            r'(size|degrees|shear|interpolation|sigma|kernel_size|value|threshold|dropit)$', m.path
        )
        and isinstance(m.value, (int, float, list))
    ),
    'a hook goes by any name': lambda m: (
        re.fullmatch(r'default_hooks\.\w+', m.path) and m.kind == 'key'
    ),
    'which parameters there are is known once there is a model: the optimiser names the key': (
        lambda m: 'custom_keys' in m.path and m.kind == 'key'
    ),
    'which modules there are is known once there is a model: the technique names them': lambda m: (
        re.fullmatch(r'dropit|quantized_activations(\.bits)?', m.path)
    ),
}


def verdict(mutation):
    """``'named'``, the reason why it is harmless, or what is wrong."""
    try:
        mutation.check()
    except ConfigError as error:
        named = '\n'.join(error.problems)
        parts = [part for path, _ in mutation.changes for part in path.split('.')]
        return 'named' if any(part in named for part in parts[-1:] + parts[:1]) else str(error)
    except Exception as error:  # what a user would see as a traceback
        return repr(error)
    return next((why for why, holds in HARMLESS.items() if holds(mutation)), 'slips through')


def verdicts(count):
    found = {str(mutation): verdict(mutation) for mutation in mutations(count)}
    wrong = {m: said for m, said in found.items() if said != 'named' and said not in HARMLESS}
    assert not wrong, '\n'.join(f'{m}: {said}' for m, said in wrong.items())
    return Counter(found.values())


def test_a_sample_of_mutations_is_named_or_harmless():
    assert verdicts(80)['named'] > 50


@pytest.mark.slow
@pytest.mark.fault(
    'A key, type or value of a config is wrong, or an entry is missing',
    'named before a model is built, or harmless',
    '1,000 of 1,000 mutations',
)
def test_all_mutations_are_named_or_harmless():
    said = verdicts(COUNT)
    assert sum(said.values()) == COUNT
    assert said['named'] > 800
