"""COCO 2017's boxes; images are flipped, and torchvision's models resize and normalise them.

The data lies in ``data/coco/train2017``, ``data/coco/val2017`` and ``data/coco/annotations``.
``train_dataloader.dataset.masks=True`` adds the masks. Needs pycocotools.
"""

train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='list_samples'),
    dataset=dict(
        type='CocoDetection',
        root='data/coco/train2017',
        annotations='data/coco/annotations/instances_train2017.json',
        only_annotated=True,
        transforms=[dict(type='torchvision/RandomHorizontalFlip', p=0.5)],
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='list_samples'),
    dataset=dict(
        type='CocoDetection',
        root='data/coco/val2017',
        annotations='data/coco/annotations/instances_val2017.json',
    ),
)
test_dataloader = val_dataloader
