"""What torch keeps private of data loaders: the processes that a loader keeps between passes."""

from __future__ import annotations

from typing import Any


def end_workers(loader: Any) -> None:
    """End the processes of a data loader with ``persistent_workers``; a next pass starts others.

    When the garbage collector finds them instead, the queues through which they would hear of it
    are closed first: each is waited for, five seconds, and killed.
    """
    iterator, loader._iterator = loader._iterator, None
    if iterator is not None:
        iterator._shutdown_workers()
