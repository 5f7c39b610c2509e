"""Supervised classification with a small ViT on scikit-learn's digits.

Top-1 on 540 held-out digits: 94.6 % (untrained 9.8 %; 20-NN on the raw pixels 97.0 %), with 16.2
MiB saved for backward at the peak (torch 2.15, 2026-11-21):

    python tools/train.py configs/classify_vit.py

The loss is additive, so that its memory technique is accumulation:
``_base_/techniques/accumulation.py`` in the place of the schedule. ``model.freeze_backbone=True``
makes it a linear probe.
"""

_base_ = [
    '_base_/datasets/digits_one_view.py',
    '_base_/schedules/adamw_cosine.py',
    '_base_/default_runtime.py',
    '_base_/knn_evaluation.py',
]

model = dict(
    type='Classifier',
    backbone=dict(
        type='TimmBackbone',
        model_name='vit_tiny_patch16_224',
        img_size=16,
        patch_size=4,
        in_chans=1,
        embed_dim=128,
        depth=2,
        num_heads=4,
        class_token=False,
        global_pool='avg',
    ),
    num_classes=10,
)
val_evaluator = [dict(type='AccuracyMetric'), dict(type='KNNMetric', k=20, temperature=0.07)]
test_evaluator = val_evaluator
custom_hooks = [dict(type='EvaluateFirstHook')]  # the collapse hook watches an embedding
train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=10)
