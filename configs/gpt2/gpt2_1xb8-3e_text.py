"""GPT-2 fine-tuned on a text of one's own, with DropIT.

Not measured here (no weights). The paper reports no language model: the settings are common ones.
The text lies in ``data/text/train.txt`` and ``data/text/val.txt``, the weights and the tokenizer in
the folder ``data/pretrained/gpt2``, as transformers saves them. Needs transformers. From scratch:
``model.pretrained=False model.model_name=gpt2`` and a larger optim_wrapper.optimizer.lr.
``dropit=None`` is the plain run.

Sources: A. Radford et al., Language Models are Unsupervised Multitask Learners, 2019; J. Chen et
al., DropIT, ICLR 2023.
"""

_base_ = ['../_base_/default_runtime.py', '../_base_/techniques/dropit.py']

model = dict(type='CausalLanguageModel', model_name='data/pretrained/gpt2')
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='stack_views'),
    dataset=dict(
        type='TextBlocks',
        file='data/text/train.txt',
        block_size=1024,
        tokenizer='data/pretrained/gpt2',
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=1,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='stack_views'),
    dataset=dict(
        type='TextBlocks',
        file='data/text/val.txt',
        block_size=1024,
        tokenizer='data/pretrained/gpt2',
    ),
)
test_dataloader = val_dataloader
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=5e-5, weight_decay=0.01),
    clip_grad=dict(max_norm=1.0),
    # The output layer is the embedding: one tensor under two names.
    paramwise_cfg=dict(bias_decay_mult=0.0, norm_decay_mult=0.0, bypass_duplicate=True),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=100),
    dict(type='CosineAnnealingLR', eta_min=0.0, convert_to_iter_based=True),
]
dropit = dict(strategy='mink', gamma=0.9)
train_cfg = dict(by_epoch=True, max_epochs=3, val_interval=1)
val_evaluator = dict(type='PerplexityMetric')
val_cfg = dict()
test_evaluator = val_evaluator
test_cfg = dict()
custom_hooks = [dict(type='EvaluateFirstHook')]
