"""The memory of the optimiser."""
