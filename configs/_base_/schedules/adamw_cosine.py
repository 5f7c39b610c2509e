"""AdamW, linear warm-up, cosine to a small rate; no weight decay on biases and norms."""

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.04),
    clip_grad=dict(max_norm=3.0),
    paramwise_cfg=dict(bias_decay_mult=0.0, norm_decay_mult=0.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, end=3, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=3, eta_min=1e-6, convert_to_iter_based=True),
]
