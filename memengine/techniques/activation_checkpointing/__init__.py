"""Activation checkpointing: what is computed again in backward."""
