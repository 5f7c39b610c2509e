"""ImageNet-1k as in the DINO paper: two global views of 224x224 and eight local ones of 96x96.

The first global view is always blurred; the second one is blurred with probability 0.1 and
solarised with 0.2; local ones are blurred with 0.5. The data lies in ``data/imagenet/train`` and
``data/imagenet/val`` (a link to it will do), one folder per class. Validation is k-NN: ``train`` is
the bank, ``val`` the queries, both resized to 256 and cropped to 224.

Source: M. Caron et al., Emerging Properties in Self-Supervised Vision Transformers, ICCV 2021.
"""

_train_source = dict(type='ImageNet', root='data/imagenet', split='train')
_val_source = dict(type='ImageNet', root='data/imagenet', split='val')

_colour = [
    dict(type='torchvision/RandomHorizontalFlip', p=0.5),
    dict(
        type='torchvision/RandomApply',
        transforms=[
            dict(
                type='torchvision/ColorJitter',
                brightness=0.4,
                contrast=0.4,
                saturation=0.2,
                hue=0.1,
            )
        ],
        p=0.8,
    ),
    dict(type='torchvision/RandomGrayscale', p=0.2),
    dict(type='torchvision/ToImage'),
]
_blur = dict(type='torchvision/GaussianBlur', kernel_size=13, sigma=(0.1, 2.0))  # 3 sigma wide
_normalise = [
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
    dict(type='torchvision/Normalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
]
_global_crop = dict(
    type='torchvision/RandomResizedCrop', size=224, scale=(0.4, 1.0), interpolation='bicubic'
)
_local_crop = dict(
    type='torchvision/RandomResizedCrop', size=96, scale=(0.05, 0.4), interpolation='bicubic'
)
_global_1 = [_global_crop, *_colour, _blur, *_normalise]
_global_2 = [
    _global_crop,
    *_colour,
    dict(type='torchvision/RandomApply', transforms=[_blur], p=0.1),
    dict(type='torchvision/RandomSolarize', threshold=128, p=0.2),
    *_normalise,
]
_local = [
    _local_crop,
    *_colour,
    dict(type='torchvision/RandomApply', transforms=[_blur], p=0.5),
    *_normalise,
]
_plain = [
    dict(type='torchvision/Resize', size=256, interpolation='bicubic'),
    dict(type='torchvision/CenterCrop', size=224),
    dict(type='torchvision/ToImage'),
    *_normalise,
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=8,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='stack_views'),
    dataset=dict(
        type='ImageDataset',
        source=_train_source,
        pipeline=[
            dict(
                type='MultiCrop',
                views=[
                    dict(num=1, pipeline=_global_1),
                    dict(num=1, pipeline=_global_2),
                    dict(num=8, pipeline=_local),
                ],
            ),
            dict(type='PackInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=64,
    num_workers=8,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='stack_views'),
    dataset=dict(
        type='BankAndQueries',
        bank=dict(type='ImageDataset', source=_train_source, pipeline=_plain),
        queries=dict(type='ImageDataset', source=_val_source, pipeline=_plain),
    ),
)
test_dataloader = val_dataloader

del _train_source, _val_source, _colour, _blur, _normalise
del _global_crop, _local_crop, _global_1, _global_2, _local, _plain
