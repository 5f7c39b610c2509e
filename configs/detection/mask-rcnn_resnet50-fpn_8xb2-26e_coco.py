"""Mask R-CNN with ResNet-50-FPN on COCO, with DropIT.

Not measured here (no COCO, no weights). Reported by the DropIT paper, box AP on val2017: 37.9
plain, 38.5 at gamma=0.8; mask AP 34.5 both times. All else is as for Faster R-CNN, which this goes
on from.

Sources: K. He et al., Mask R-CNN, 2017; J. Chen et al., DropIT, ICLR 2023.
"""

_base_ = 'faster-rcnn_resnet50-fpn_8xb2-26e_coco.py'

model = dict(detector='MaskRCNN')
dropit = dict(gamma=0.8)
train_dataloader = dict(dataset=dict(masks=True))
val_evaluator = dict(kinds=['box', 'mask'])
test_evaluator = val_evaluator
