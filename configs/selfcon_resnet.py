"""SelfCon."""

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
