"""DeiT-Ti on ImageNet-1k from scratch, with DropIT.

Not measured here (no ImageNet). Reported by the DropIT paper, top-1: 72.1 % plain, 72.5 % at
gamma=0.5, 72.4 % at 0.6, 72.1 % at 0.7. Start with torchrun --nproc_per_node 8 tools/train.py THIS
--launcher pytorch; fewer processes want a larger train_dataloader.batch_size, 1024 in all.

The settings are those of DeiT's training script, with its repeated augmentation.
``dropit=None`` is the plain run.

Sources: H. Touvron et al., Training data-efficient image transformers, ICML 2021; J. Chen et al.,
DropIT, ICLR 2023.
"""

_base_ = [
    '../_base_/datasets/imagenet_deit.py',
    '../_base_/default_runtime.py',
    '../_base_/accuracy_evaluation.py',
    '../_base_/techniques/dropit.py',
]

model = dict(
    type='Classifier',
    data_preprocessor=dict(
        type='MixedBatches', num_classes=1000, mixup_alpha=0.8, cutmix_alpha=1.0
    ),
    backbone=dict(type='TimmBackbone', model_name='deit_tiny_patch16_224', drop_path_rate=0.1),
    num_classes=1000,
    label_smoothing=0.1,
)
# The rate is for 512 images a step; auto_scale_lr scales it to the batch of all ranks.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.05),
    paramwise_cfg=dict(
        bias_decay_mult=0.0,
        norm_decay_mult=0.0,
        custom_keys=dict(pos_embed=dict(decay_mult=0.0), cls_token=dict(decay_mult=0.0)),
    ),
)
auto_scale_lr = dict(enable=True, base_batch_size=512)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=5, eta_min=1e-5, convert_to_iter_based=True),
]
dropit = dict(strategy='mink', gamma=0.5)
train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=10)
