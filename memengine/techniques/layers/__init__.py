"""Layers that spend less memory, or agree over ranks."""
