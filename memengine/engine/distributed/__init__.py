"""Processes, ranks and threads."""
