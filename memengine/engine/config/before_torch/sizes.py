"""Sizes of memory, and places between the leanest and the fastest plan, as users write them."""

from __future__ import annotations

import re
from typing import Any

FITS = {'least': 0.0, 'balanced': 0.5, 'fastest': 1.0}

_UNITS = {
    **{f'{letter}iB': 1024**power for power, letter in enumerate('KMGT', 1)},
    **{f'{letter}B': 1000**power for power, letter in enumerate('KMGT', 1)},
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``'24GiB'``, ``'800 MiB'`` or ``'16GB'``.

    Raises:
        ValueError: For a text without one of these units, or no size above 0.
    """
    found = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*', str(text))
    unit = _UNITS.get(found.group(2)) if found else None
    nbytes = int(float(found.group(1)) * unit) if found and unit else 0
    if not nbytes:
        raise ValueError(
            f"a size is a number with one of the units {', '.join(_UNITS)}, as '24GiB'; got "
            f'{text!r}'
        )
    return nbytes


def parse_fit(value: Any) -> float:
    """Where between the leanest plan (0) and the fastest (1), of a number or one of ``FITS``.

    Raises:
        ValueError: For another word, or a number that is not from 0 to 1.
    """
    try:
        fit = FITS[value] if value in FITS else float(value)
    except (TypeError, ValueError):
        fit = -1
    if isinstance(value, bool) or not 0 <= fit <= 1:
        raise ValueError(
            f'it is a number from 0 (least memory) to 1 (fastest), or one of {", ".join(FITS)}; '
            f'got {value!r}'
        )
    return fit
