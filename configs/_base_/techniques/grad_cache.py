"""The gradient cache: the step of the whole batch in the memory of ``chunk_size`` images.

Add this file to ``_base_``, or set ``optim_wrapper.type=GradCacheOptimWrapper`` and
``optim_wrapper.chunk_size=16`` on the command line.
"""

optim_wrapper = dict(type='GradCacheOptimWrapper', chunk_size=16)
