"""Bits by sensitivity: beside every other choice, on cases small enough to try them all."""

import itertools
import math
import random

import pytest

from memengine.techniques.compression.bit_allocation import allot_bits, variance

CHOICES = (1, 2, 4, 8, 32)


def total(sensitivities, bits):
    return sum(map(variance, sensitivities, bits))


def cost(numels, bits):
    return sum(n * b for n, b in zip(numels, bits, strict=True))


def best(sensitivities, numels, budget):
    """The smallest total of all choices within `budget` bits."""
    return min(
        (
            total(sensitivities, bits)
            for bits in itertools.product(CHOICES, repeat=len(numels))
            if cost(numels, bits) <= budget
        ),
        default=math.inf,
    )


@pytest.mark.parametrize('seed', range(12))
def test_against_every_choice(seed):
    draw = random.Random(seed)
    sensitivities = [10 ** draw.uniform(-4, 4) for _ in range(4)]
    numels = [draw.randint(1, 50) for _ in range(4)]
    for average_bits in (1, 1.5, 2, 3, 4, 6, 8, 20, 32):
        budget = average_bits * sum(numels)
        bits = allot_bits(sensitivities, numels, average_bits)
        assert set(bits) <= set(CHOICES)
        assert cost(numels, bits) <= budget
        with_bits_used = best(sensitivities, numels, cost(numels, bits))
        assert total(sensitivities, bits) <= 2.5 * with_bits_used


def test_no_choice_with_one_widening_less_does_better():
    draw, ratios = random.Random(0), []
    for _ in range(60):
        sensitivities = [10 ** draw.uniform(-3, 3) for _ in range(4)]
        numels = [draw.randint(1, 20) for _ in range(4)]
        average_bits = draw.uniform(1, 10)
        budget = average_bits * sum(numels)
        reached = total(sensitivities, allot_bits(sensitivities, numels, average_bits))
        one_widening = 24 * max(numels)
        assert reached <= best(sensitivities, numels, budget - one_widening) * (1 + 1e-12)
        ratios.append(reached / max(best(sensitivities, numels, budget), 1e-30))
    assert sorted(ratios)[len(ratios) // 2] < 1.5


def test_beats_the_same_bits_for_all():
    draw = random.Random(1)
    sensitivities = [10 ** draw.uniform(-3, 3) for _ in range(50)]
    numels = [draw.randint(1000, 100000) for _ in range(50)]
    for same in (2, 4, 8):
        reached = total(sensitivities, allot_bits(sensitivities, numels, same))
        assert reached < 0.5 * total(sensitivities, [same] * 50)


def test_sensitive_places_get_more_and_insensitive_ones_the_fewest():
    bits = allot_bits([1e-3, 1e3, 0.0, 1.0], [100] * 4, 4)
    assert bits[1] >= bits[3] >= bits[0] >= bits[2] == 1
    assert bits[1] > bits[0]


def test_limits_of_the_budget():
    assert allot_bits([1.0, 2.0], [10, 20], 1) == [1, 1]
    assert allot_bits([1.0, 2.0], [10, 20], 32) == [32, 32]
    assert allot_bits([1.0, 2.0], [10, 20], 4, choices=(4,)) == [4, 4]
    assert allot_bits([], [], 4) == []


def test_a_large_place_that_does_not_fit_leaves_the_rest_to_others():
    assert allot_bits([1e6, 1.0], [1000, 10], 1.05)[1] > 1


def test_places_without_elements():
    assert allot_bits([1.0, 1.0], [0, 10], 8)[1] == 8


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (([1.0], [1, 2], 4), 'one length'),
        (([-1.0], [1], 4), 'not negative'),
        (([math.nan], [1], 4), 'finite'),
        (([math.inf], [1], 4), 'finite'),
        (([1.0], [1], 0.5), 'fewest bits'),
        (([1.0], [1], 2, (4, 8)), 'fewest bits'),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        allot_bits(*arguments)
