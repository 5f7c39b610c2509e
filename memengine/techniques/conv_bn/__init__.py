"""Frozen BatchNorm that keeps no activation of its own."""
