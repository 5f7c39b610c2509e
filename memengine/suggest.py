"""What errors suggest: the real names near a misspelt one, and what to install."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


def import_optional(module: str, user: str, package: str = '') -> Any:
    """A module of an optional package; ImportError names who needs it, and what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition('.')[0]
        raise ImportError(f'{user} needs {name}: pip install {package or name}') from error


# How similar, from 0 to 1: worth a suggestion; taken for a misspelling, of an argument and of a
# type where there may be none; one letter off.
LOOSE, STRICT, STRICTER, ONE_LETTER = 0.6, 0.8, 0.85, 0.99


def similar(name: str, names: Iterable[str], cutoff: float = LOOSE, limit: int = 3) -> list[str]:
    """The names that ``name`` may be a misspelling of, nearest first.

    Case is ignored, and so are a scope or library in front (``mmengine.``, ``torchvision/``).
    """
    scored = {other: _similarity(_bare_name(name), _bare_name(other)) for other in names}
    ranked = sorted(scored, key=lambda o: (-scored[o], _is_class(o) != _is_class(name), o))
    # A name that is one letter off leaves no room for those that are merely similar.
    least = (
        max(cutoff, scored[ranked[0]] - 0.1) if ranked and scored[ranked[0]] >= STRICT else cutoff
    )
    return [other for other in ranked if scored[other] >= least][:limit]


def did_you_mean(name: str, names: Iterable[str], cutoff: float = LOOSE, after: str = ':') -> str:
    """``": did you mean 'x' or 'y'?"``, or nothing when no name is near."""
    found = similar(name, names, cutoff)
    return f'{after} did you mean {" or ".join(map(repr, found))}?' if found else ''


def _is_class(name: str) -> bool:
    """By its spelling, which tells ``Block`` from ``blocks``."""
    return name[:1].isupper()


def _bare_name(name: str) -> str:
    return name.rpartition('/')[2].rpartition('.')[2].lower()


def _similarity(written: str, real: str) -> float:
    if written == real or _is_one_letter_off(written, real):
        return ONE_LETTER
    ratio = difflib.SequenceMatcher(None, written, real).ratio()
    begins = len(written) > 2 and real.startswith(written)
    return max(ratio, LOOSE) if begins else ratio


def _is_one_letter_off(written: str, real: str) -> bool:
    """Whether one letter is missing, too many or changed, or two neighbours are swapped."""
    if abs(len(written) - len(real)) > 1 or min(len(written), len(real)) < 1 or len(real) < 2:
        return False
    start = 0
    while start < min(len(written), len(real)) and written[start] == real[start]:
        start += 1
    rest, real_rest = written[start:], real[start:]
    if len(rest) == len(real_rest):
        changed = rest[1:] == real_rest[1:] and len(real) > 3
        return changed or (rest[:2] == real_rest[1::-1] and rest[2:] == real_rest[2:])
    return rest[1:] == real_rest or rest == real_rest[1:]
