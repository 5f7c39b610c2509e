"""Sizes of memory and the dial between plans, as users write them."""

import pytest

from memengine.engine.config.before_torch.sizes import parse_bytes, parse_fit


def test_sizes():
    assert parse_bytes('24GiB') == 24 * 2**30
    assert parse_bytes('1.5 MiB') == 3 * 2**19
    assert parse_bytes('16GB') == 16 * 10**9


@pytest.mark.parametrize('text', ['24', 'GiB', '-1GiB', '0MiB', '24gigs', ''])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match='GiB'):
        parse_bytes(text)


def test_the_dial():
    assert [parse_fit(one) for one in ('least', 'balanced', 'fastest', '0.3', 1)] == [
        0,
        0.5,
        1,
        0.3,
        1,
    ]
    for wrong in ('fast', -0.1, 1.1, True, [0.5], 'nan'):
        with pytest.raises(ValueError, match='least, balanced, fastest'):
            parse_fit(wrong)
