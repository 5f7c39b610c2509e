"""Compressed activations: what a model saves for backward is kept as codes that rules choose.

The forward pass is the plain one, bit for bit: operations run as they are, and so do their
derivatives, on what the codes give back. When a module ends, the operations in it are looked up in
autograd's graph (``backward_needs.py``), so it is known for each saved tensor what it is for.
Memory that several operations save is coded once; memory that one of them needs as it is stays as
it is for all of them, because a code beside it would cost instead of save.

A module's forward (``compressed_forward.py``) is told to autograd's hooks (``forward_hooks.py``),
which ask the graph (``forward_graph.py``) what they hold tensors for.
"""
