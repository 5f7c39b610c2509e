"""Activation checkpointing: the model's blocks are computed again in backward, not kept.

Add this file to ``_base_``, or set ``activation_checkpointing="['blocks']"`` on the command line.
Other settings stand in a dict: ``keep=['matmuls', 'attention']`` computes only the cheap ops again,
``budget=0.5`` chooses what is kept by what it costs, ``every=2`` takes every second block.
"""

activation_checkpointing = dict(modules=['blocks'])
