"""Recomputed activations: what norms and activation functions give is not kept.

Add this file to ``_base_``, or set ``recomputed_activations=True`` on the command line.
"""

recomputed_activations = True
