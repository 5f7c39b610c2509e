"""k-NN on the features as DINO does it, before training and while it goes on."""

val_evaluator = dict(type='KNNMetric', k=20, temperature=0.07)
val_cfg = dict()
test_evaluator = val_evaluator
test_cfg = dict()
custom_hooks = [
    dict(type='EvaluateFirstHook'),
    dict(type='CollapseHook'),
]
