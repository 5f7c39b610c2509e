"""How a step spends less memory; plain torch, one file each."""

from memengine.techniques.conv_bn_eval import ConvBNEval, efficient_conv_bn_eval
from memengine.techniques.grad_cache import Tower, cached_step
from memengine.techniques.grad_cache_call import GradCache
from memengine.techniques.multi_crop import CropSlice, dino_step, plan_slices
from memengine.techniques.random_state import RandomState
from memengine.techniques.slicing import additive_step, split_batch
from memengine.techniques.weight_norm import WeightNormLinear

__all__ = [
    'ConvBNEval',
    'CropSlice',
    'GradCache',
    'RandomState',
    'Tower',
    'WeightNormLinear',
    'additive_step',
    'cached_step',
    'dino_step',
    'efficient_conv_bn_eval',
    'plan_slices',
    'split_batch',
]
