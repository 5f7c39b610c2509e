"""CIFAR-100 enlarged to 224x224, with DeiT's augmentations, repeated.

The data lies in ``data/cifar-100-python``, in its Python layout.
"""

_base_ = 'imagenet_deit.py'

train_dataloader = dict(
    dataset=dict(source=dict(_delete_=True, type='CIFAR100', root='data', train=True))
)
val_dataloader = dict(
    dataset=dict(source=dict(_delete_=True, type='CIFAR100', root='data', train=False))
)
test_dataloader = val_dataloader
