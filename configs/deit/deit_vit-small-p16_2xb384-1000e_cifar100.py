"""DeiT-S from ImageNet-1k to CIFAR-100, with DropIT.

Not measured here (no CIFAR-100, no weights). Reported by the DropIT paper, top-1: 89.7 % plain,
90.1 % at gamma=0.9. Start with torchrun --nproc_per_node 2 tools/train.py THIS --launcher pytorch;
other numbers of processes want another train_dataloader.batch_size, 768 in all.

The weights are DeiT's own file, ``data/pretrained/deit_small_patch16_224-cd65a155.pth``. The
settings are those of the paper's command; what it leaves open is as DeiT's script has it.
``dropit=None`` is the plain run.

Sources: H. Touvron et al., Training data-efficient image transformers, ICML 2021; J. Chen et al.,
DropIT, ICLR 2023.
"""

_base_ = [
    '../_base_/datasets/cifar100_deit.py',
    '../_base_/default_runtime.py',
    '../_base_/accuracy_evaluation.py',
    '../_base_/techniques/dropit.py',
]

model = dict(
    type='Classifier',
    data_preprocessor=dict(type='MixedBatches', num_classes=100, mixup_alpha=0.8, cutmix_alpha=1.0),
    backbone=dict(
        type='TimmBackbone',
        model_name='deit_small_patch16_224',
        checkpoint_path='data/pretrained/deit_small_patch16_224-cd65a155.pth',
        drop_path_rate=0.1,
    ),
    num_classes=100,
    label_smoothing=0.1,
)
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='SGD', lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    paramwise_cfg=dict(
        bias_decay_mult=0.0,
        norm_decay_mult=0.0,
        custom_keys=dict(pos_embed=dict(decay_mult=0.0), cls_token=dict(decay_mult=0.0)),
    ),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-4, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=5, eta_min=1e-5, convert_to_iter_based=True),
]
dropit = dict(strategy='mink', gamma=0.9)
train_dataloader = dict(batch_size=384)
train_cfg = dict(by_epoch=True, max_epochs=1000, val_interval=20)
