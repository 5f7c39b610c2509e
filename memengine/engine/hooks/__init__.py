"""Hooks: what happens around a step."""

from memengine.engine.hooks.activation_checkpointing import ActivationCheckpointingHook
from memengine.engine.hooks.activation_offload import ActivationOffloadHook
from memengine.engine.hooks.algorithm import AlgorithmHook
from memengine.engine.hooks.checkpoint import CheckpointHook
from memengine.engine.hooks.collapse import CollapseHook
from memengine.engine.hooks.compile_blocks import CompileBlocksHook
from memengine.engine.hooks.conv_bn_eval import EfficientConvBNEvalHook
from memengine.engine.hooks.dropit import DropITHook
from memengine.engine.hooks.evaluate_first import EvaluateFirstHook
from memengine.engine.hooks.finite_loss import FiniteLossHook, NonFiniteLossError
from memengine.engine.hooks.memory import MemoryHook
from memengine.engine.hooks.progress import ProgressHook
from memengine.engine.hooks.quantized_activations import QuantizedActivationsHook
from memengine.engine.hooks.random_state import RandomStateHook
from memengine.engine.hooks.recomputed_activations import RecomputedActivationsHook
from memengine.engine.hooks.report import ReportHook

__all__ = [
    'ActivationCheckpointingHook',
    'ActivationOffloadHook',
    'AlgorithmHook',
    'CheckpointHook',
    'CollapseHook',
    'CompileBlocksHook',
    'DropITHook',
    'EfficientConvBNEvalHook',
    'EvaluateFirstHook',
    'FiniteLossHook',
    'MemoryHook',
    'NonFiniteLossError',
    'ProgressHook',
    'QuantizedActivationsHook',
    'RandomStateHook',
    'RecomputedActivationsHook',
    'ReportHook',
]
