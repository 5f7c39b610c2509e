"""The gradient cache: the step of the whole batch in the memory of ``chunk_size`` images.

Put this line into ``_base_`` in the place of the schedule's, which it contains, or set
``optim_wrapper.type=GradCacheOptimWrapper`` and ``optim_wrapper.chunk_size=16`` on the command
line.
"""

_base_ = '../schedules/adamw_cosine.py'

optim_wrapper = dict(type='GradCacheOptimWrapper', chunk_size=16)
