"""SelfCon with a small ResNet and one exit on scikit-learn's digits, with labels and a single view.

20-NN top-1 on 540 held-out digits: 98.3 % (untrained 70.7 %, raw pixels 97.0 %), with 11.5 MiB
saved for backward at the peak, 97 s of processor time (torch 2.15, 2026-11-21):

    python tools/train.py configs/selfcon_resnet.py

The ResNet is narrow, and keeps a stride of 8, because the digits are small; its exit is after the
second of four stages.

The gradient of the whole batch in the memory of 16 images: ``_base_/techniques/grad_cache.py`` in
the place of the schedule. The batch of all ranks, on several: add ``_base_/techniques/disco.py``.
The matrix of similarities in tiles: ``model.loss.tile_size``.
"""

_base_ = [
    '_base_/datasets/digits_one_view.py',
    '_base_/schedules/adamw_cosine.py',
    '_base_/default_runtime.py',
    '_base_/knn_evaluation.py',
]

model = dict(
    type='SelfCon',
    backbone=dict(
        type='TimmBackbone',
        model_name='resnet18',
        in_chans=1,
        output_stride=8,
        channels=[16, 32, 64, 128],
    ),
    head=dict(type='ProjectionHead', out_dim=64, hidden_dim=128),
    exits=[2],
    loss=dict(type='ConLoss', temperature=0.1, base_temperature=0.1),
)
train_dataloader = dict(batch_size=128)
train_cfg = dict(by_epoch=True, max_epochs=40, val_interval=10)
