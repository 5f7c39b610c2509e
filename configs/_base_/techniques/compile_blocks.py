"""Compiled blocks: torch.compile of each repeated block, one compilation for all that are alike.

Add this file to ``_base_``, or set ``compile_blocks=True`` on the command line. Not beside dropped,
quantised or recomputed activations.
"""

compile_blocks = dict(modules=['blocks'])
