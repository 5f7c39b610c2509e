"""Top-1 and top-5 accuracy, before training and while it goes on."""

val_evaluator = dict(type='AccuracyMetric', topk=(1, 5))
val_cfg = dict()
test_evaluator = val_evaluator
test_cfg = dict()
custom_hooks = [dict(type='EvaluateFirstHook')]
