"""Selection against a full sort and torch's own nonzero; what it does is tested with the codec."""

import pytest
import torch

from memengine.techniques.codecs import top_k as selection
from memengine.techniques.codecs.sparse import Sparsifier
from memengine.techniques.codecs.top_k import (
    INTEGER_OF,
    largest,
    magnitudes,
    masks_of_blocks,
    places_in_blocks,
    positions_of,
)
from memengine.techniques.modules.private_random import restart_private_generators
from tests.techniques.codecs.test_sparse import code_bytes

STRATEGIES = [
    dict(strategy='mink'),
    dict(strategy='random'),
    *(dict(strategy='block_mink', block_size=size) for size in (8, 96, 1024)),
]


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
    mask = torch.cat(list(masks_of_blocks(flat, 256, kept))).view(20, 256)
    offsets = torch.cat(list(places_in_blocks(flat, 256, kept)))
    assert torch.equal(torch.zeros_like(mask).scatter(1, offsets.long(), True), mask)
    order = flat.view(20, 256).abs().argsort(dim=1, descending=True, stable=True)
    ties = flat.abs().unique().numel() < flat.numel()
    assert ties and mask.sum(1).eq(kept).all()
    least = flat.view(20, 256).abs().gather(1, order[:, kept - 1 : kept])
    assert (flat.view(20, 256).abs()[mask].view(20, kept) >= least).all()


@pytest.mark.parametrize('dtype', list(INTEGER_OF))
@pytest.mark.parametrize('is_tied', [False, True])
@pytest.mark.parametrize('numel', [5, 1030])
def test_parts_of_any_size_give_the_same(monkeypatch, numel, is_tied, dtype):
    flat = torch.randn(numel, dtype=torch.float64)
    flat = (flat.round() if is_tied else flat).to(dtype)
    for settings in STRATEGIES:
        for gamma in (0.5, 0.95):
            codec = Sparsifier(gamma=gamma, **settings)
            found = []
            for at_once in (2**17, 100, 256):
                monkeypatch.setitem(selection._PART_NUMEL, 'cpu', at_once)
                torch.manual_seed(0)
                restart_private_generators()
                code = codec(flat)
                found.append((code.decode(), code_bytes(code)))
            for decoded, nbytes in found[1:]:
                assert nbytes == found[0][1]
                assert torch.equal(decoded, found[0][0])


def test_largest_leaves_out_zeros_and_as_many_ties_as_it_must():
    flat = torch.tensor([0.0, 2.0, -2.0, 0.0, 2.0, 1.0, -3.0, -0.0])
    for kept, count in ((1, 1), (2, 2), (3, 3), (5, 5), (7, 5)):
        found = largest(magnitudes(flat), kept, with_zeros=False)
        (mask,) = found.masks()
        assert found.kept == mask.sum() == count and mask[6] and not mask[[0, 3, 7]].any()
        assert mask[5] == (kept >= 5)
