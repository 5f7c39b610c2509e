"""Accumulation over iterations, which averages the gradients of several batches.

It is MMEngine's: described here, carried out by ``memengine/engine/optim/optim_wrapper.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from memengine.technique import Settings, Technique, setting


@dataclass(frozen=True)
class AccumulationOverIterationsSettings(Settings):
    """Settings of accumulation over iterations, as ``optim_wrapper`` takes them."""

    accumulative_counts: int = setting(1, help='between updates', unit='iterations', low=1)
    accumulate_coupled: bool = setting(
        False, help='also where samples meet in the loss, which is another objective'
    )


TECHNIQUE = Technique(
    key='accumulation_over_iterations',
    title='accumulation over iterations',
    settings=AccumulationOverIterationsSettings,
    switch='optim_wrapper.accumulative_counts=4',
    loss='additive',
    use_when='an update is to see more samples than fit; where samples meet in the loss it is '
    '**another objective**, and BatchNorm sees each part by itself',
    saves='activations: all but those of one part',
    price='none',
    page='accumulation.md',
)
