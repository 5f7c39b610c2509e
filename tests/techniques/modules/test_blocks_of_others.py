"""The blocks of transformers' and open_clip's models: found, checkpointed, offloaded, compiled.

Small models made from configs; nothing is downloaded.
"""

import copy

import pytest
import torch
import transformers
from open_clip import model as clip

from memengine._torch_private.ops import compiled_checkpoints_write_twice
from memengine.memory import SavedBytes
from memengine.techniques import checkpoint_activations, compile_blocks, offload_activations
from memengine.techniques.modules.blocks import find_blocks
from memengine.testing import assert_same_step

SMALL = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
IMAGES = (2, 3, 16, 16)


def bert():
    config = transformers.BertConfig(vocab_size=50, pad_token_id=0, **SMALL)
    words = torch.randint(1, 50, (2, 12))
    padded = torch.ones_like(words)
    padded[1, 8:] = 0
    return transformers.BertModel(config), dict(input_ids=words, attention_mask=padded)


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=4, hidden_dropout_prob=0.1, **SMALL)
    return transformers.ViTModel(config), dict(pixel_values=torch.randn(IMAGES))


def gpt2():
    sizes = dict(n_embd=16, n_layer=3, n_head=2, n_positions=16, vocab_size=50)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config), dict(input_ids=torch.randint(1, 50, (2, 16)))


def open_clip():
    image = clip.CLIPVisionCfg(layers=3, width=32, head_width=16, patch_size=4, image_size=16)
    text = clip.CLIPTextCfg(context_length=8, vocab_size=50, width=16, heads=2, layers=2)
    words = torch.randint(1, 50, (2, 8))
    return clip.CLIP(16, image, text), dict(image=torch.randn(IMAGES), text=words)


OF_VIT = 'layers' if hasattr(vit()[0], 'layers') else 'encoder.layer'  # before transformers 5
BLOCKS = {
    bert: [f'encoder.layer.{index}' for index in range(3)],
    vit: [f'{OF_VIT}.{index}' for index in range(3)],
    gpt2: [f'transformer.h.{index}' for index in range(3)],
    open_clip: [f'visual.transformer.resblocks.{index}' for index in range(3)]
    + [f'transformer.resblocks.{index}' for index in range(2)],
}
each_model = pytest.mark.parametrize('make', BLOCKS, ids=lambda make: make.__name__)


def made(make):
    """A model in float64 and training mode, with dropout where it has some, and its inputs."""
    torch.manual_seed(0)
    model, inputs = make()
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model.double().train(), doubled


def step(model, inputs):
    """Outputs and gradients of a step, and the bytes that forward has left."""
    torch.manual_seed(1)
    with SavedBytes(model, *inputs.values()) as meter:
        out = model(**inputs)
        kept = meter.live_bytes
    values = out.to_tuple() if hasattr(out, 'to_tuple') else out
    sum(value.square().mean() for value in values).backward()
    result = {f'out {index}': value for index, value in enumerate(values)}
    result |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result, kept


@each_model
def test_blocks_are_found(make):
    assert list(find_blocks(made(make)[0])) == BLOCKS[make]


@each_model
@pytest.mark.parametrize(
    ('options', 'share'),
    [(dict(), 0.55), (dict(keep=['matmuls', 'attention']), 0.9), (dict(budget=0.5), 0.75)],
    ids=['all', 'selective', 'budget'],
)
def test_checkpointed(make, options, share):
    plain, inputs = made(make)
    model = copy.deepcopy(plain)
    handle = checkpoint_activations(model, **options)
    for _ in range(2):  # what is kept is settled in the first
        want, plain_bytes = step(plain, inputs)
        actual, kept = step(model, inputs)
        assert_same_step(actual, want)
    assert handle.names == BLOCKS[make] and handle.unused() == {}
    assert kept < share * plain_bytes


@each_model
def test_checkpointed_compiled_and_offloaded(make):
    plain, inputs = made(make)
    model = copy.deepcopy(plain)
    torch._dynamo.reset()
    checkpoint_activations(model)
    has_buffers = any(True for name in BLOCKS[make] for _ in model.get_submodule(name).buffers())
    if has_buffers and compiled_checkpoints_write_twice():  # GPT-2's mask, in old transformers
        with pytest.raises(ValueError, match='write into its buffers'):
            compile_blocks(model, backend='aot_eager')
        return
    assert compile_blocks(model, backend='aot_eager').names == BLOCKS[make]
    moved = offload_activations(model, 'host', min_bytes=64)
    for _ in range(2):
        assert_same_step(step(model, inputs)[0], step(plain, inputs)[0])
    assert moved.moved_bytes[0] > 0
