"""What the hooks of compressed activations say after the first iteration."""

from __future__ import annotations

from logging import Logger

from memengine.techniques.compression.rules import Tally

__all__ = ['check_compressed']


def check_compressed(setting: str, kept: Tally, strict: bool, logger: Logger) -> None:
    """Log what was compressed so far.

    Args:
        setting: What errors call it.
        kept: The account.
        strict: Whether nothing is an error.
        logger: Told.

    Raises:
        ValueError: When nothing was compressed and ``strict`` is set.
    """
    if not kept.before and strict:
        raise ValueError(
            f'{setting}: the first iteration saved nothing that can be compressed: what is '
            'trained is frozen, checkpointed, excluded, or smaller than a code would be; set '
            'strict=False to go on'
        )
    logger.info(
        f'{setting}: {kept.before / 2**20:.1f} MiB saved as {kept.after / 2**20:.1f} MiB in the '
        f'first iteration, in {len(kept.places)} places'
    )
