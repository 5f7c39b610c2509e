"""How a saved tensor is computed again: of which operations (``operations.py``), and from what."""
