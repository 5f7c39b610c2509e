"""Quantised activations: what is saved for backward is kept in 8 bits.

Add this file to ``_base_``, or set ``quantized_activations=True`` on the command line. Together
with DropIT, which then has the inputs of layers, it is the rest that is quantised.
"""

quantized_activations = dict(bits=8)
