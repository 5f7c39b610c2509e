"""Marks of tests for what some version of torch cannot do."""

import pytest
import torch

from memengine._torch_private.distributed import CAN_SHARD_ON_CPU

NEEDS_SHARDING = pytest.mark.skipif(
    not CAN_SHARD_ON_CPU and not torch.cuda.is_available(),
    reason='fully_shard of torch 2.6 needs GPUs',
)
