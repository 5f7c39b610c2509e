"""Small algorithms in float64 and batches for them."""

import torch

from memengine.models import CLIP, Classifier, SelfCon, SigLIP, SimCLR, SupCon

B, CLASSES, VOCABULARY = 5, 3, 9

VIT = dict(
    type='TimmBackbone',
    model_name='vit_tiny_patch16_224',
    img_size=8,
    patch_size=4,
    in_chans=1,
    embed_dim=12,
    depth=2,
    num_heads=2,
)
HEAD = dict(type='ProjectionHead', out_dim=6)
TEXT = dict(
    type='TextTransformer',
    vocab_size=VOCABULARY,
    context_length=6,
    width=8,
    depth=1,
    num_heads=2,
)

SETTINGS = {
    SimCLR: dict(backbone=VIT, head=HEAD),
    SupCon: dict(backbone=VIT, head=HEAD),
    SelfCon: dict(backbone=VIT, head=HEAD, exits=[0]),
    Classifier: dict(backbone=VIT, num_classes=CLASSES),
    CLIP: dict(image=VIT, text=TEXT, embed_dim=6),
    SigLIP: dict(image=VIT, text=TEXT, embed_dim=6),
}
VIEWS = {SimCLR: 2, SupCon: 2, SelfCon: 2, Classifier: None, CLIP: None, SigLIP: None}


def build(kind, **changes):
    torch.manual_seed(0)
    return kind(**{**SETTINGS[kind], **changes}).double()


def batch(kind, views=..., batch_size=B, seed=0):
    """Inputs and data samples."""
    generator = torch.Generator().manual_seed(seed)
    count = VIEWS[kind] if views is ... else views
    images = [
        torch.randn(batch_size, 1, 8, 8, dtype=torch.float64, generator=generator)
        for _ in range(count or 1)
    ]
    labels = torch.arange(batch_size) % CLASSES
    tokens = torch.randint(1, VOCABULARY, (batch_size, 6), generator=generator)
    tokens[:, 4:] = 0  # padding
    samples = dict(label=labels, index=torch.arange(batch_size), tokens=tokens)
    return (images[0] if count is None else images), samples
