"""ImageNet-1k with DeiT's augmentations: RandAugment and random erasing at 224x224, repeated.

The data lies in ``data/imagenet/train`` and ``data/imagenet/val`` (a link to it will do), one
folder per class. An epoch is a third of the images, each in three augmentations. MixUp and CutMix
act on batches and are a part of the model, ``MixedBatches``.

Source: H. Touvron et al., Training data-efficient image transformers, ICML 2021.
"""

_normalise = [
    dict(type='torchvision/ToImage'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
    dict(type='torchvision/Normalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
]

train_dataloader = dict(
    batch_size=128,
    num_workers=8,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='RepeatedAugmentation', num_repeats=3),
    collate_fn=dict(type='stack_views'),
    dataset=dict(
        type='ImageDataset',
        source=dict(type='ImageNet', root='data/imagenet', split='train'),
        pipeline=[
            dict(type='torchvision/RandomResizedCrop', size=224, interpolation='bicubic'),
            dict(type='torchvision/RandomHorizontalFlip'),
            dict(
                type='TimmRandAugment',
                policy='rand-m9-mstd0.5-inc1',
                image_size=224,
                interpolation='bicubic',
            ),
            *_normalise,
            dict(type='torchvision/RandomErasing', p=0.25, value='random'),
            dict(type='PackInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=192,
    num_workers=8,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='stack_views'),
    dataset=dict(
        type='ImageDataset',
        source=dict(type='ImageNet', root='data/imagenet', split='val'),
        pipeline=[
            dict(type='torchvision/Resize', size=256, interpolation='bicubic'),
            dict(type='torchvision/CenterCrop', size=224),
            *_normalise,
            dict(type='PackInputs'),
        ],
    ),
)
test_dataloader = val_dataloader

del _normalise
