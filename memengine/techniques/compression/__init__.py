"""Saved activations that are dropped, quantised or recomputed."""
