"""Finetuning of what `configs/dino_vit.py` has learned without labels, on scikit-learn's digits.

Top-1 on 540 held-out digits: 96.1 % (94.6 % without what was learned before, by
`configs/classify_vit.py`); 20-NN 97.6 % (before it 94.8 %, raw pixels 97.0 %), with 16.2 MiB saved
for backward at the peak (torch 2.15, 2026-11-23):

    python tools/train.py configs/dino_vit.py
    python tools/train.py configs/finetune_vit.py

For a run of one's own: ``load_from.path`` is its folder, ``model.backbone`` the one that it
trained. The head is new and learns at the full rate, the rest at a tenth of it. Norms and biases of
the backbone decay, too: ``norm_decay_mult`` and ``bias_decay_mult`` are not for what a key names.
"""

_base_ = 'classify_vit.py'

load_from = dict(path='work_dirs/dino_vit', part='teacher.backbone', into='backbone')
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.1, decay_mult=1.0)))
)
