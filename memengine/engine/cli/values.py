"""The values of ``--cfg-options``: one small syntax, and an error for all else.

========================  =========================================================
``1``, ``1e-3``           numbers
``True``, ``False``       also ``true`` and ``false``
``None``
``[a, 1]``, ``(0.9, 1)``  lists and tuples; without brackets, ``a,b`` is a list
``{a: 1}``, ``dict(a=1)`` dicts, by names
``'a, b'``, ``"1"``       text in quotes: as it is
all else                  text
========================  =========================================================

They may hold each other, with blanks wherever one likes inside brackets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_CLOSING = {'(': ')', '[': ']', '{': '}'}
_NAMED = {'true': True, 'false': False, 'none': None}
_NAME = re.compile(r'[\w.]+')


class ValueSyntaxError(ValueError):
    """Text that begins like a list, a tuple, a dict or a quotation and is none."""


def parse_value(text: str) -> Any:
    """The value that a text stands for.

    Raises:
        ValueSyntaxError: When brackets or quotes do not match, an entry is missing, or something
            follows a closing bracket.
    """
    entries = list(_split(text))
    return _one(entries[0]) if len(entries) == 1 else [_one(entry) for entry in _filled(entries)]


def replacements(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which ``a._delete_=True`` and what is set below ``a`` are one, a dict.

    Set one by one they would be merged with what is there, which was to be taken away.
    """
    found = dict(options)
    for path in [path for path in options if path.endswith('._delete_')]:
        above = path.removesuffix('_delete_')
        if above + '_delete_' not in found:  # it is in one further up by now
            continue
        whole: dict[str, Any] = {}
        for below in [other for other in found if other.startswith(above)]:
            *parts, last = below.removeprefix(above).split('.')
            node = whole
            for part in parts:
                if not isinstance(node.get(part), dict):
                    node[part] = {}
                node = node[part]
            node[last] = found.pop(below)
        found[above[:-1]] = whole
    return found


def _one(text: str) -> Any:
    text = text.strip()
    if text[:1] in ('"', "'"):
        return _quoted(text)
    if text[:1] in _CLOSING:
        inside = _inside(text, text[0])
        if text[0] == '{':
            return dict(_pair(entry, ':') for entry in _entries(inside))
        values = [_one(entry) for entry in _entries(inside)]
        return values if text[0] == '[' else tuple(values)
    if text.startswith('dict('):
        return dict(_pair(entry, '=') for entry in _entries(_inside(text[4:], '(')))
    if text.lower() in _NAMED:
        return _NAMED[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _quoted(text: str) -> str:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = None
    if not isinstance(value, str):
        raise ValueSyntaxError('its quotes do not enclose all of it')
    return value


def _inside(text: str, bracket: str) -> str:
    """What a pair of brackets encloses, which is all of the text."""
    for end, depth in _depths(text):
        if not depth:
            if end + 1 == len(text):
                return text[1:end]
            raise ValueSyntaxError(f'{text[end + 1 :]!r} follows its {_CLOSING[bracket]}')
    raise AssertionError('brackets have been matched')


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """Each place outside of quotes, and how many brackets are open behind it."""
    is_value = text.lstrip()[:1] in (*_CLOSING, '"', "'") or text.lstrip().startswith('dict(')
    open_ones: list[str] = []
    quote = ''
    for place, letter in enumerate(text):
        if quote:
            quote = '' if letter == quote and text[place - 1] != '\\' else quote
            continue
        # An apostrophe within a word is none that opens a quotation.
        if letter in '"\'' and (not place or text[place - 1] in ' ,([{=:'):
            quote = letter
        elif letter in _CLOSING:
            open_ones.append(letter)
        elif letter in _CLOSING.values() and (not open_ones or _CLOSING[open_ones.pop()] != letter):
            raise ValueSyntaxError(f'its {letter} closes nothing')
        yield place, len(open_ones)
    if quote and is_value:
        raise ValueSyntaxError(f'its {quote} is not closed')
    if open_ones:
        raise ValueSyntaxError(f'its {open_ones[-1]} is not closed')


def _split(text: str) -> Iterator[str]:
    """Parts between the commas that are in no brackets or quotes."""
    begin = 0
    for place, depth in _depths(text):
        if text[place] == ',' and not depth:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _filled(entries: list[str]) -> list[str]:
    """The entries, of which the last may be empty, as after a comma at the end."""
    kept = entries if entries[-1].strip() else entries[:-1]
    if not all(entry.strip() for entry in kept):
        raise ValueSyntaxError('there is nothing between two of its commas')
    return kept


def _entries(inside: str) -> list[str]:
    return _filled(list(_split(inside)))


def _pair(entry: str, sign: str) -> tuple[str, Any]:
    name, found, value = entry.partition(sign)
    name = name.strip()
    name = _quoted(name) if name[:1] in ('"', "'") else name
    if not found or not value.strip() or not (sign == ':' or _NAME.fullmatch(name)):
        raise ValueSyntaxError(f'{entry.strip()!r} is not NAME{sign}VALUE')
    return name, _one(value)
