"""What holds of DropIT's selection for any tensor: ties, zeros, gaps, orders in memory, dtypes."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memengine.techniques.codecs.memory_order import in_memory_order
from memengine.techniques.codecs.sparse import Cast, Sparsifier
from memengine.techniques.codecs.top_k import masks_of_blocks, places_in_blocks
from tests.test_properties import drawn, same_examples, seeds, shapes, strided

HALVES_AND_ALL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
gammas = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999]) | st.floats(0, 0.99)


@st.composite
def selected_from(draw, is_zero_free=False):
    """A tensor with ties, in any dtype, with its dimensions in any order and gaps between them."""
    seed, shape, order = draw(seeds), draw(shapes), draw(st.randoms(use_true_random=False))
    tensor = (strided(seed, shape, order) * draw(st.sampled_from([1, 2, 50]))).round()
    if is_zero_free:
        tensor = torch.where(tensor == 0, 1.0, tensor)
    tensor = tensor.to(draw(st.sampled_from(HALVES_AND_ALL)))
    return tensor[..., :: draw(st.sampled_from([1, 1, 2]))]


@settings(same_examples, max_examples=100)
@given(tensor=selected_from(), gamma=gammas)
def test_mink_keeps_as_many_as_gamma_says_and_none_is_smaller(tensor, gamma):
    decoded = Sparsifier('mink', gamma)(tensor).decode()
    assert decoded.dtype == tensor.dtype and decoded.shape == tensor.shape
    is_kept = decoded != 0
    assert torch.equal(decoded[is_kept], tensor[is_kept])
    number = max(1, int(tensor.numel() * (1 - gamma)))
    assert int(is_kept.sum()) == min(number, int((tensor != 0).sum()))
    kept, dropped = tensor[is_kept].double().abs(), tensor[~is_kept].double().abs()
    if len(kept) and len(dropped):
        assert kept.min() >= dropped.max()


@settings(same_examples, max_examples=100)
@given(tensor=selected_from(is_zero_free=True), gamma=gammas)
def test_random_keeps_as_many_as_gamma_says(tensor, gamma):
    decoded = Sparsifier('random', gamma)(tensor).decode()
    is_kept = decoded != 0
    assert torch.equal(decoded[is_kept], tensor[is_kept])
    assert int(is_kept.sum()) == min(tensor.numel(), max(1, int(tensor.numel() * (1 - gamma))))


@settings(same_examples, max_examples=100)
@given(tensor=selected_from(is_zero_free=True), gamma=gammas, size=st.sampled_from([1, 3, 8, 300]))
def test_blocks_keep_their_largest_as_many_of_each(tensor, gamma, size):
    decoded = Sparsifier('block_mink', gamma, block_size=size)(tensor).decode()
    flat, lies = (in_memory_order(one)[0] for one in (decoded, tensor.clone()))
    size = max(1, min(size, len(lies)))
    for kept, block in zip(flat.split(size), lies.split(size), strict=True):
        is_kept = kept != 0
        assert torch.equal(kept[is_kept], block[is_kept])
        assert int(is_kept.sum()) == min(len(block), max(1, len(block) - round(len(block) * gamma)))
        if not is_kept.all():
            assert block[is_kept].abs().min() >= block[~is_kept].abs().max()


@settings(same_examples, max_examples=100)
@given(tensor=selected_from(), gamma=gammas, strategy=st.sampled_from(['mink', 'block_mink']))
def test_what_was_kept_is_kept_again(tensor, gamma, strategy):
    codec = Sparsifier(strategy, gamma)
    once = codec(tensor).decode()
    assert torch.equal(codec(once).decode(), once)


@same_examples
@given(seed=seeds, blocks=st.integers(1, 5), size=st.integers(1, 256), data=st.data())
def test_offsets_are_the_places_of_the_mask(seed, blocks, size, data):
    kept = data.draw(st.integers(1, size))
    flat = drawn(seed, blocks * size).mul(3).round().float()
    offsets = torch.cat(list(places_in_blocks(flat, size, kept))).long()
    mask = torch.zeros(blocks, size, dtype=torch.bool).scatter_(1, offsets, True)
    assert torch.equal(mask.flatten(), torch.cat(list(masks_of_blocks(flat, size, kept))))
    assert (mask.sum(1) == kept).all()


@same_examples
@given(seed=seeds, shape=shapes, scale=st.sampled_from([1.0, 1e30, math.inf]))
def test_a_cast_is_as_near_as_its_dtype_and_finite_where_it_was(seed, shape, scale):
    tensor = (drawn(seed, *shape) * scale).float()
    for dtype in (torch.bfloat16, torch.float16):
        decoded, limit = Cast(dtype)(tensor).decode(), torch.finfo(dtype).max
        assert torch.equal(decoded.isfinite(), tensor.isfinite())
        near = tensor.clamp(-limit, limit) if math.isfinite(scale) else tensor
        torch.testing.assert_close(decoded, near, rtol=torch.finfo(dtype).eps, atol=1e-7)
