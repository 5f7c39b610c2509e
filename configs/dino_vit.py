_base_ = ['_base_/datasets/digits_dino.py', '_base_/default_runtime.py']

model = dict(
    type='DINO',
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
    head=dict(type='DINOHead', out_dim=256, hidden_dim=256, bottleneck_dim=64, use_bn=True),
    local_crops=0,
    warmup_teacher_temp=0.03,
    teacher_temp=0.03,
    centering='sinkhorn',
    momentum_teacher=0.8,
    freeze_last_layer=0,
)
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.04),
    clip_grad=dict(max_norm=3.0),
    paramwise_cfg=dict(bias_decay_mult=0.0, norm_decay_mult=0.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, end=3, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=3, eta_min=1e-6, convert_to_iter_based=True),
    dict(type='CosineWeightDecay', end_value=0.4, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=60, val_interval=10)
val_cfg = dict()
