"""How a step spends less memory; plain torch, one file each."""

from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    Checkpointing,
    checkpoint_activations,
)
from memengine.techniques.activation_offload import ActivationOffload, offload_activations
from memengine.techniques.apply_techniques import AppliedTechniques, apply_techniques
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Cast, Sparsifier
from memengine.techniques.compiling import CompiledBlocks, compile_blocks
from memengine.techniques.compression.dropit import DropIT, drop_activations, to_dropit, undo_dropit
from memengine.techniques.compression.quantized_activations import (
    QuantizedActivations,
    quantize_activations,
)
from memengine.techniques.compression.recomputed_activations import (
    RecomputedActivations,
    recompute_activations,
)
from memengine.techniques.conv_bn.conv_bn_eval import ConvBNEval, efficient_conv_bn_eval
from memengine.techniques.layers.weight_norm import WeightNormLinear
from memengine.techniques.modules.blocks import find_blocks, select_modules
from memengine.techniques.modules.forward_state import RandomState
from memengine.techniques.optimizer_memory.adamw_bf16 import AdamWBf16
from memengine.techniques.optimizer_memory.in_backward import step_in_backward
from memengine.techniques.sharding.clipping import clip_grad_norm_
from memengine.techniques.sharding.shard_model import ShardedModel, shard_model
from memengine.techniques.slices.accumulation_within_iteration import additive_step
from memengine.techniques.slices.grad_cache import cached_step
from memengine.techniques.slices.grad_cache_call import GradCache
from memengine.techniques.slices.multi_crop import CropSlice, dino_step, plan_slices
from memengine.techniques.slices.sliced_step import StepLosses, sliced_step
from memengine.techniques.slices.slicing import split_batch
from memengine.techniques.slices.tower import Tower

__all__ = [
    'ActivationOffload',
    'AdamWBf16',
    'AppliedTechniques',
    'Cast',
    'Checkpointing',
    'CompiledBlocks',
    'ConvBNEval',
    'CropSlice',
    'DropIT',
    'GradCache',
    'QuantizedActivations',
    'Quantizer',
    'RandomState',
    'RecomputedActivations',
    'ShardedModel',
    'Sparsifier',
    'StepLosses',
    'Tower',
    'WeightNormLinear',
    'additive_step',
    'apply_techniques',
    'cached_step',
    'checkpoint_activations',
    'clip_grad_norm_',
    'compile_blocks',
    'dino_step',
    'drop_activations',
    'efficient_conv_bn_eval',
    'find_blocks',
    'offload_activations',
    'plan_slices',
    'quantize_activations',
    'recompute_activations',
    'select_modules',
    'shard_model',
    'sliced_step',
    'split_batch',
    'step_in_backward',
    'to_dropit',
    'undo_dropit',
]
