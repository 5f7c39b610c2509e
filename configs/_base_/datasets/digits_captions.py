"""scikit-learn's digits, 16x16 and one channel, with captions made from their labels.

Training draws a template for each image; validation captions the stratified 30 % held out with
other sentences, of words that training has seen. Ids of the tokenizer: 4 and the words.
"""

_names = ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']
_train_templates = [
    'a photo of the digit {}',
    'a handwritten {}',
    'this is the number {}',
    'a small grey image of a {}',
]
_test_templates = ['a photo of the number {}', 'this is a handwritten digit {}']
_words = ['a', 'digit', 'grey', 'handwritten', 'image', 'is', 'number', 'of', 'photo', 'small']
_words = [*_words, 'the', 'this', *_names]  # 22, so that the text tower's vocab_size is 26
_tokenize = dict(
    type='Tokenize',
    tokenizer=dict(type='WordTokenizer', vocabulary=_words, context_length=12),
)
_pack = dict(type='PackInputs', keys=['label', 'index', 'tokens'])

_train_source = dict(type='Digits', split='train', split_by='stratified', test_fraction=0.3, seed=0)
_test_source = dict(type='Digits', split='test', split_by='stratified', test_fraction=0.3, seed=0)

# Crop and affine act on PIL images and the rest on tensors, where each costs least at this size.
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
            *_view,
            dict(type='LabelCaption', names=_names, templates=_train_templates),
            _tokenize,
            _pack,
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
        type='ImageDataset',
        source=_test_source,
        pipeline=[
            *_plain,
            dict(type='LabelCaption', names=_names, templates=_test_templates, choice='index'),
            _tokenize,
            _pack,
        ],
    ),
)
test_dataloader = val_dataloader

del _train_source, _test_source, _view, _plain, _tokenize, _pack
del _names, _words, _train_templates, _test_templates
