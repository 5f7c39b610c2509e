"""Zero-shot classification and retrieval, before training and while it goes on."""

val_evaluator = [
    dict(type='ZeroShotMetric'),
    dict(type='RetrievalMetric', topk=(1,), match='label'),
]
val_cfg = dict()
test_evaluator = val_evaluator
test_cfg = dict()
custom_hooks = [
    dict(type='EvaluateFirstHook'),
    dict(type='CollapseHook'),
]
