"""DeiT-B from ImageNet-1k to CIFAR-100, with DropIT.

Not measured here (no CIFAR-100, no weights). Reported by the DropIT paper, top-1: 90.8 % plain,
91.3 % at gamma=0.9. All else is as for DeiT-S, which this goes on from; the weights are
``data/pretrained/deit_base_patch16_224-b5f2ef4d.pth``.
"""

_base_ = 'deit_vit-small-p16_2xb384-1000e_cifar100.py'

model = dict(
    backbone=dict(
        model_name='deit_base_patch16_224',
        checkpoint_path='data/pretrained/deit_base_patch16_224-b5f2ef4d.pth',
    )
)
