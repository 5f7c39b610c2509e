"""What the dataset asks of a source.

A source is a map-style object: ``len(source)``, ``source[i] -> (PIL image, int label)`` and
``source.classes``. In place of an image there may be a list of frames, which the transforms take
for views of one sample. Where its images are files, ``source.path(i)`` names them. An image that
cannot be read raises ``OSError``, which is what the dataset's ``on_error`` setting acts on.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from PIL import Image

NO_LABEL = -1
"""The label of images that have none."""


class Source(Protocol):
    """What :class:`memengine.datasets.ImageDataset` reads its samples from."""

    classes: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image | list[Image.Image], int]: ...


@runtime_checkable
class HasPaths(Protocol):
    """A source whose images are files."""

    def path(self, index: int) -> str:
        """The file that sample ``index`` is read from."""


@runtime_checkable
class HasLabels(Protocol):
    """A source that knows the labels of its samples without reading them."""

    labels: list[int]


@runtime_checkable
class HasCaptions(Protocol):
    """A source that has texts for its images."""

    def captions(self, index: int) -> list[str]:
        """The texts of sample ``index``, one or more."""
