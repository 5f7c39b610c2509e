"""The largest size, of a batch say, whose bytes are within a limit."""

from __future__ import annotations

from collections.abc import Callable


def largest(
    bytes_of: Callable[[int], int], limit_bytes: int, start: int, most: int | None = None
) -> int:
    """Find the largest size that fits, to a thirty-second of itself.

    By doubling and halving at first, then where a line through the two sizes that it lies between
    meets the limit, or in their middle if the same side has moved twice.

    Args:
        bytes_of: What a size takes; it does not fall with the size. Asked once for each.
        limit_bytes: What it may take.
        start: The size to begin with.
        most: No size above it is tried.

    Returns:
        The size; of it only the first six binary digits may be others than 0. It is 0 when
        nothing fits.
    """
    below, above = 0, None if most is None else most + 1
    known: dict[int, int] = {}
    size, last_fits, again = min(start, most or start), None, False
    while above is None or above - below > _grain(below):
        known[size] = bytes_of(size)
        fits = known[size] <= limit_bytes
        again, last_fits = fits is last_fits, fits
        below, above = (size, above) if fits else (below, size)
        size = _next(below, above, known, limit_bytes, again)
    return below


def _grain(size: int) -> int:
    return 1 << max(size.bit_length() - 6, 0)


def _next(
    below: int, above: int | None, known: dict[int, int], limit_bytes: int, again: bool
) -> int:
    if above is None:
        return 2 * below
    if below in known and above in known and not again:
        share = (limit_bytes - known[below]) / (known[above] - known[below])
        size = below + int(share * (above - below))
    else:
        size = min((below + above) // 2, 2 * below if below else above)
    return max(size - size % _grain(size), below + _grain(below))
