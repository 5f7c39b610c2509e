"""SimCLR."""

_base_ = [
    '_base_/datasets/digits_dino.py',
    '_base_/schedules/adamw_cosine.py',
    '_base_/default_runtime.py',
    '_base_/knn_evaluation.py',
]

model = dict(
    type='SimCLR',
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
    head=dict(type='ProjectionHead', out_dim=64, hidden_dim=128),
    loss=dict(type='NTXentLoss', temperature=0.2),
)
train_dataloader = dict(batch_size=128)
train_cfg = dict(by_epoch=True, max_epochs=60, val_interval=10)
