"""What every run shares: scope, hooks, logging and randomness."""

default_scope = 'memengine'
randomness = dict(seed=0)
log_level = 'INFO'
log_processor = dict(window_size=10)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10),
    checkpoint=dict(type='CheckpointHook', interval=10, max_keep_ckpts=2),
)
