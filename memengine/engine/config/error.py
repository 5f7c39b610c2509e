"""What is wrong with a config, raised and put into words; imports neither torch nor MMEngine."""

from __future__ import annotations

from collections.abc import Iterable

from memengine.suggest import STRICT, did_you_mean, similar

FREE_KEYS = ('vars', 'custom')
"""Keys below which anything may stand."""


class ConfigError(ValueError):
    """A config that says something that is not there, or cannot be.

    Args:
        problems: One sentence each, beginning with the setting's dotted path.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__('\n'.join(self.problems))


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence for a key at the top of a config that means nothing."""
    known = set(known)
    own = '' if similar(key, known, STRICT) else '; a key of your own goes below vars=dict(...)'
    return f"unknown key '{key}'{did_you_mean(key, known)}{own}"


def unknown_option(key: str, known: Iterable[str]) -> str:
    """The same for the first key of an option of the command line."""
    known = set(known)
    own = '' if similar(key, known) else f'; a key of your own goes below {FREE_KEYS[0]}'
    return f"unknown key '{key}'{did_you_mean(key, known)}{own}"
