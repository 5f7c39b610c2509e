"""Multi-crop views of 32-pixel colour crops of scikit-image's photographs, for DINO.

Two global views of 32x32 and four local ones of 16x16; their number is
``train_dataloader.dataset.pipeline.0.views.1.num``. Where it differs from the ImageNet recipe, and
why: the hue stays (it tells photographs apart, and shifting it costs as much as the rest of the
jitter), the blur is narrower (the crops are small), nothing is solarised. Validation is k-NN: crops
of the left halves are the bank, crops of the right halves the queries.
"""

_train_source = dict(type='Photographs', split='train', crop_size=32, crops_per_image=200, seed=0)
_test_source = dict(type='Photographs', split='test', crop_size=32, crops_per_image=100, seed=0)

# Crop and flip act on PIL images and the rest on tensors, where each costs least at this size.
_colour_and_blur = [
    dict(type='torchvision/RandomHorizontalFlip', p=0.5),
    dict(type='torchvision/PILToTensor'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
    dict(
        type='torchvision/RandomApply',
        transforms=[
            dict(type='torchvision/ColorJitter', brightness=0.4, contrast=0.4, saturation=0.2)
        ],
        p=0.8,
    ),
    dict(type='torchvision/RandomGrayscale', p=0.2),
    dict(
        type='torchvision/RandomApply',
        transforms=[dict(type='torchvision/GaussianBlur', kernel_size=5, sigma=(0.1, 1.0))],
        p=0.5,
    ),
    dict(type='torchvision/Normalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
]
_global = [
    dict(type='torchvision/RandomResizedCrop', size=32, scale=(0.4, 1.0), interpolation='bicubic'),
    *_colour_and_blur,
]
_local = [
    dict(type='torchvision/RandomResizedCrop', size=16, scale=(0.1, 0.4), interpolation='bicubic'),
    *_colour_and_blur,
]
_plain = [
    dict(type='torchvision/Resize', size=[32, 32]),
    dict(type='torchvision/PILToTensor'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
    dict(type='torchvision/Normalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=1,
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
                views=[dict(num=2, pipeline=_global), dict(num=4, pipeline=_local)],
            ),
            dict(type='PackInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=256,
    num_workers=1,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='stack_views'),
    dataset=dict(
        type='BankAndQueries',
        bank=dict(type='ImageDataset', source=_train_source, pipeline=_plain),
        queries=dict(type='ImageDataset', source=_test_source, pipeline=_plain),
    ),
)
test_dataloader = val_dataloader

del _train_source, _test_source, _colour_and_blur, _global, _local, _plain
