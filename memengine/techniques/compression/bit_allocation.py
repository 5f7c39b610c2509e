"""How many bits each place gets of a common budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

_WHOLE = 32  # bits: kept as it is


def variance(sensitivity: float, bits: int) -> float:
    """The squared error of a place's gradient at `bits`, from its squared error at one bit.

    A step is the range over ``2 ** bits - 1``, and the variance of rounding goes with its square.
    """
    return 0.0 if bits == _WHOLE else sensitivity / (2**bits - 1) ** 2


def allot_bits(
    sensitivities: Sequence[float],
    numels: Sequence[int],
    average_bits: float,
    choices: Sequence[int] = (1, 2, 4, 8, 32),
) -> list[int]:
    """Choose bits for each place, so that the sum of squared gradient errors is small.

    All places start at the fewest bits. Then the widening that removes most error for each bit
    that it costs is made, as long as one fits the budget. As each further bit removes less, no
    choice does better with a budget that is smaller by the largest widening.

    Args:
        sensitivities: Squared error of the gradient that each place causes at one bit, of which
            ``2 ** bits - 1`` steps leave ``1 / (2 ** bits - 1) ** 2``. Measured at b bits, it is
            the error times ``(2 ** b - 1) ** 2``. Any unit, the same for all.
        numels: Elements that each place keeps.
        average_bits: Budget: mean bits of an element over all places.
        choices: Bits to choose from; 32 is to keep the tensor, without error.

    Returns:
        The bits of each place. Places without sensitivity stay at the fewest.

    Raises:
        ValueError: For sequences of different lengths, sensitivities that are negative or not
            finite, and a budget below the fewest bits.

    Cost: ``n log n`` of the number of places; no tensors.

    Source: Liu et al., GACT: Activation Compressed Training for Generic Network Architectures
    (2022), section 4: a greedy choice from a heap, there from the most bits downwards.
    """
    if len(sensitivities) != len(numels):
        raise ValueError(
            f'sensitivities and numels must be of one length, got {len(sensitivities)} and '
            f'{len(numels)}'
        )
    for place, sensitivity in enumerate(sensitivities):
        if not (math.isfinite(sensitivity) and sensitivity >= 0):
            raise ValueError(
                f'sensitivities must be finite and not negative, got {sensitivity} at {place}'
            )
    widths = sorted(choices)
    if average_bits < widths[0]:
        raise ValueError(
            f'average_bits={average_bits} is below the fewest bits to choose from, {widths[0]}'
        )
    left = (average_bits - widths[0]) * sum(numels)
    chosen = [0] * len(numels)  # index into widths

    def widening(place: int) -> tuple[float, int]:
        bits, wider = widths[chosen[place]], widths[chosen[place] + 1]
        sensitivity = sensitivities[place]
        gain = variance(sensitivity, bits) - variance(sensitivity, wider)
        return -gain / ((wider - bits) * max(numels[place], 1)), place

    places = range(len(numels)) if len(widths) > 1 else ()
    heap = [widening(place) for place in places if sensitivities[place] > 0]
    heapq.heapify(heap)
    while heap:
        _, place = heapq.heappop(heap)
        bits, wider = widths[chosen[place]], widths[chosen[place] + 1]
        cost = (wider - bits) * numels[place]
        if cost > left:
            continue
        left -= cost
        chosen[place] += 1
        if chosen[place] + 1 < len(widths):
            heapq.heappush(heap, widening(place))
    return [widths[index] for index in chosen]
