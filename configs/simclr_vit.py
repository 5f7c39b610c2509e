"""SimCLR with a small ViT on scikit-learn's digits: 128 pairs of views a step.

20-NN top-1 on 540 held-out digits: 94.6 % (95.0 % at epoch 50; untrained 41.5 %, raw pixels
97.0 %), with 65.4 MiB saved for backward at the peak (torch 2.15, 2026-11-21):

    python tools/train.py configs/simclr_vit.py

The gradient of the whole batch in the memory of 16 images: ``_base_/techniques/grad_cache.py`` in
the place of the schedule. The batch of all ranks, on several: add ``_base_/techniques/disco.py``.
The matrix of similarities in tiles: ``model.loss.tile_size``.
"""

_base_ = [
    '_base_/datasets/digits_dino.py',
    '_base_/schedules/adamw_cosine.py',
    '_base_/default_runtime.py',
    '_base_/knn_evaluation.py',
]

model = dict(
    type='SimCLR',
    backbone=dict(
        type='TimmBackbone',
        model_name='vit_tiny_patch16_224',
        img_size=16,
        patch_size=4,
        in_chans=1,
        embed_dim=128,
        depth=2,
        num_heads=4,
        class_token=False,
        global_pool='avg',
    ),
    head=dict(type='ProjectionHead', out_dim=64, hidden_dim=128),
    loss=dict(type='NTXentLoss', temperature=0.2),
)
train_dataloader = dict(batch_size=128)
train_cfg = dict(by_epoch=True, max_epochs=60, val_interval=10)
