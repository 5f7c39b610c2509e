"""Labels as numbers of named classes, which may be those of another data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class NamedClasses:
    """A data set with ``metainfo['classes']``, whose labels can be numbered as another's."""

    metainfo: dict[str, Any]
    _numbers: Mapping[int, int] = {}

    def follow_classes(self, classes: Sequence[str], of: str = 'training') -> None:
        """Number labels as other data do; these then have their classes.

        Args:
            classes: The others', in the order of their numbers.
            of: What these are called in errors.

        Raises:
            ValueError: For a class that the others lack.
        """
        own = self.metainfo['classes']
        places = {name: number for number, name in enumerate(classes)}
        if lacking := [name for name in own if name not in places]:
            more = f' (and {len(lacking) - 1} more)' if len(lacking) > 1 else ''
            known = ', '.join([*map(str, classes[:10]), *(['...'] if len(classes) > 10 else [])])
            raise ValueError(
                f'there is a class {lacking[0]!r}{more} that {of} lacks, which has {known}: rename '
                'it as there, or take it out'
            )
        before = self._numbers or {number: number for number in range(len(own))}
        self._numbers = {label: places[own[number]] for label, number in before.items()}
        self.metainfo = {**self.metainfo, 'classes': list(classes)}

    def label_of(self, label: int) -> int:
        """The number of a sample's class, by what its source says; no class stays none."""
        return self._numbers.get(label, label)
