"""Accumulation: an additive loss in slices of ``micro_batch_size`` images, within one iteration.

Put this line into ``_base_`` in the place of the schedule's, which it contains, or set
``optim_wrapper.type=AccumulationOptimWrapper`` and ``optim_wrapper.micro_batch_size=16`` on the
command line. Losses in which samples meet (SimCLR, SupCon, SelfCon, CLIP, SigLIP) need
``grad_cache.py``.
"""

_base_ = '../schedules/adamw_cosine.py'

optim_wrapper = dict(type='AccumulationOptimWrapper', micro_batch_size=16)
