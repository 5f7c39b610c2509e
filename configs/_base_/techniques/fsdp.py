"""Sharding: each rank holds its share of parameters, gradients and optimiser state.

Add this file to ``_base_``, or set ``model_wrapper_cfg.type=FullyShardedDataParallel`` on the
command line, and start several processes. ``offload=True`` keeps the shards in host memory;
``free_after='step'`` gathers parameters once for all slices of a step.
"""

model_wrapper_cfg = dict(type='FullyShardedDataParallel', offload=False, free_after='forward')
