"""AdamW with 4 bytes of state per parameter instead of 8: lossy, see docs/techniques.

Add this file to ``_base_`` in the place of a schedule, or set
``optim_wrapper.optimizer.type=AdamWBf16`` on the command line.
"""

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamWBf16', lr=1e-3, weight_decay=0.04),
    clip_grad=dict(max_norm=3.0),
    paramwise_cfg=dict(bias_decay_mult=0.0, norm_decay_mult=0.0),
)
