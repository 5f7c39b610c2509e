"""What every run shares: scope, seed, logging, checkpoints."""

default_scope = 'memengine'
randomness = dict(seed=0)
log_processor = dict(window_size=10)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10),
    checkpoint=dict(type='CheckpointHook', interval=10, max_keep_ckpts=2),
    memory=dict(type='MemoryHook'),
    progress=dict(type='ProgressHook'),
    report=dict(type='ReportHook'),
)
