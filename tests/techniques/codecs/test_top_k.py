"""Selection against a full sort and torch's own nonzero; what it does is tested with the codec."""

import pytest
import torch

from memengine.techniques.codecs import top_k as selection
from memengine.techniques.codecs.top_k import (
    largest_elements,
    mask_of_blocks,
    offsets_in_blocks,
    positions_of,
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize('share', [0, 0.02, 0.0999, 0.1, 0.5, 1])
@pytest.mark.parametrize('numel', [0, 1, 49, 3000])
def test_positions_are_those_of_nonzero(numel, share):
    mask = torch.rand(numel) < share
    positions = positions_of(mask)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, mask.nonzero()[:, 0])


@pytest.mark.parametrize('kept', [1, 40, 255, 256])
def test_mask_and_offsets_are_the_same_choice_and_the_largest(kept):
    flat = torch.randperm(20 * 256).float() - 2000
    mask = mask_of_blocks(flat, 256, kept).view(20, 256)
    offsets = offsets_in_blocks(flat, 256, kept).view(20, kept)
    assert torch.equal(torch.zeros_like(mask).scatter(1, offsets.long(), True), mask)
    order = flat.view(20, 256).abs().argsort(dim=1, descending=True, stable=True)
    ties = flat.abs().unique().numel() < flat.numel()
    assert ties and mask.sum(1).eq(kept).all()
    least = flat.view(20, 256).abs().gather(1, order[:, kept - 1 : kept])
    assert (flat.view(20, 256).abs()[mask].view(20, kept) >= least).all()


def test_parts_of_any_size_give_the_same(monkeypatch):
    flat = torch.randn(30 * 96)
    whole = mask_of_blocks(flat, 96, 10)
    for chunk in (1, 96, 200, 2000):
        monkeypatch.setattr(selection, 'CHUNK_NUMEL', chunk)
        assert torch.equal(mask_of_blocks(flat, 96, 10), whole)


def test_largest_leaves_out_zeros_and_as_many_ties_as_it_must():
    flat = torch.tensor([0.0, 2.0, -2.0, 0.0, 2.0, 1.0, -3.0, -0.0])
    for kept, count in ((1, 1), (2, 2), (3, 3), (5, 5), (7, 5)):
        mask, positions = largest_elements(flat, kept)
        assert torch.equal(positions, mask.nonzero()[:, 0])
        assert mask.sum() == count and mask[6] and not mask[[0, 3, 7]].any()
        assert mask[5] == (kept >= 5)
