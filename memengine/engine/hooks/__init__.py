"""Hooks: what happens around a step."""

from memengine.engine.hooks.algorithm import AlgorithmHook
from memengine.engine.hooks.finite_loss import FiniteLossHook, NonFiniteLossError
from memengine.engine.hooks.random_state import RandomStateHook

__all__ = ['AlgorithmHook', 'FiniteLossHook', 'NonFiniteLossError', 'RandomStateHook']
