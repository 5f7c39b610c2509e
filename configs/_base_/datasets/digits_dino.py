"""Two views of scikit-learn's digits, 16x16 and one channel, for DINO.

Where it differs from the ImageNet recipe, and why: no local crops (at this size they carry too
little of a digit), a crop scale of 0.6 to 1 for the same reason, no flip (a digit has a
handedness), rotation, shear and noise instead of colour. Validation is k-NN: the training digits
are the bank, the stratified 30 % held out are the queries.
"""

_train_source = dict(type='Digits', split='train', split_by='stratified', test_fraction=0.3, seed=0)
_test_source = dict(type='Digits', split='test', split_by='stratified', test_fraction=0.3, seed=0)

_view = [
    dict(type='torchvision/RandomResizedCrop', size=16, scale=(0.6, 1.0)),
    dict(type='torchvision/RandomAffine', degrees=15, shear=10, interpolation='bilinear'),
    dict(type='torchvision/PILToTensor'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
    dict(type='torchvision/ColorJitter', brightness=0.1, contrast=0.1),
    dict(
        type='torchvision/RandomApply',
        transforms=[dict(type='torchvision/GaussianBlur', kernel_size=3, sigma=(0.1, 1.0))],
        p=0.5,
    ),
    dict(type='torchvision/GaussianNoise', sigma=0.02),
    dict(type='torchvision/Normalize', mean=[0.5], std=[0.5]),
]
_plain = [
    dict(type='torchvision/Resize', size=[16, 16]),
    dict(type='torchvision/PILToTensor'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
    dict(type='torchvision/Normalize', mean=[0.5], std=[0.5]),
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
        type='BatchedImageDataset',
        source=_train_source,
        pipeline=[
            dict(type='MultiCrop', views=[dict(num=2, pipeline=_view)]),
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

del _train_source, _test_source, _view, _plain
