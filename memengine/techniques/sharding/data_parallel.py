"""Data parallel (DDP), which torch itself does.

Described here, carried out by a model wrapper: ``memengine/engine/wrappers/ddp.py``.
"""

from __future__ import annotations

from memengine.technique import Settings, Technique

TECHNIQUE = Technique(
    key='data_parallel',
    title='data parallel',
    settings=Settings,
    switch='model_wrapper_cfg.type=MMDistributedDataParallel',
    needs_ranks=True,
    use_when='there are several ranks, each of which holds the model; what ranks do by default',
    saves="activations: all but those of a rank's part of the batch",
    price='gradients on the wire, once a step',
    page='../launching.md',
)
