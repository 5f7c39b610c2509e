"""Each parameter is updated inside backward and its gradient freed: exact, no clipping by all.

Add this file to ``_base_`` in the place of a schedule, or set
``optim_wrapper.type=OptimizerInBackwardOptimWrapper`` on the command line, with
``optim_wrapper.clip_grad.type=each_norm`` (or ``optim_wrapper.clip_grad=None``) where the config
clips.
"""

optim_wrapper = dict(
    type='OptimizerInBackwardOptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.04),
    paramwise_cfg=dict(bias_decay_mult=0.0, norm_decay_mult=0.0),
)
