"""Faster R-CNN with ResNet-50-FPN on COCO, with DropIT.

Not measured here (no COCO, no weights). Reported by the DropIT paper, box AP on val2017: 37.0
plain, 37.2 at gamma=0.9. Start with torchrun --nproc_per_node 8 tools/train.py THIS --launcher
pytorch.

The data lies in ``data/coco``: ``train2017``, ``val2017`` and ``annotations``; torchvision's
weights of ResNet-50 in ``data/pretrained/resnet50-0676ba61.pth``. Needs pycocotools. The settings
are those of the paper's command; what it leaves open is as torchvision's training script has it,
but that images are not put to batches by their shape, since none is padded here.
``dropit=None`` is the plain run.

Sources: S. Ren et al., Faster R-CNN, 2015; J. Chen et al., DropIT, ICLR 2023.
"""

_base_ = [
    '../_base_/datasets/coco.py',
    '../_base_/default_runtime.py',
    '../_base_/techniques/dropit.py',
]

model = dict(
    type='TorchvisionDetector',
    detector='FasterRCNN',
    num_classes=91,
    backbone='resnet50',
    backbone_checkpoint='data/pretrained/resnet50-0676ba61.pth',
    trainable_layers=3,
)
# The rate is for 16 images a step; auto_scale_lr scales it to the batch of all ranks.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=1e-4),
)
auto_scale_lr = dict(enable=True, base_batch_size=16)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, end=1000),
    dict(type='MultiStepLR', milestones=[16, 22], gamma=0.1),
]
dropit = dict(strategy='mink', gamma=0.9)
train_cfg = dict(by_epoch=True, max_epochs=26, val_interval=1)
val_evaluator = dict(
    type='CocoMetric', annotations='data/coco/annotations/instances_val2017.json', kinds=['box']
)
val_cfg = dict()
test_evaluator = val_evaluator
test_cfg = dict()
