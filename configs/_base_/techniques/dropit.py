"""DropIT: layers keep the largest tenth of their inputs for the gradients of their weights.

Add this file to ``_base_``, or set ``dropit=True`` on the command line.
"""

dropit = dict(strategy='mink', gamma=0.9)
