"""What the tiled losses promise to cost: bytes, matmul FLOPs, and bytes on the wire."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from memengine.losses import ClipLoss, ConLoss, NTXentLoss, SigLipLoss, SupConLoss
from memengine.memory.allocated import allocated_peak_bytes
from memengine.memory.received_bytes import ReceivedBytes
from memengine.testing import run_ranks, saved_bytes

D = 64
LOSSES = {'clip': ClipLoss, 'siglip': SigLipLoss, 'ntxent': NTXentLoss, 'supcon': SupConLoss}
LOSSES['selfcon'] = ConLoss
TWO_TOWERS = 'clip', 'siglip'


def leaves(name, size, seed=0):
    """Embeddings in fp32 and, of the towers, the scalars; B * 2 * D numbers in all."""
    torch.manual_seed(seed)
    if name in ('supcon', 'selfcon'):
        return [torch.randn(size, 2, D, requires_grad=True)]
    towers = [torch.randn(size, D, requires_grad=True) for _ in range(2)]
    scalars = [torch.tensor(value, requires_grad=True) for value in (10.0, -10.0)]
    return towers + scalars[: {'clip': 1, 'siglip': 2}.get(name, 0)]


def flops(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize('name', LOSSES)
def test_flops(name):
    size, tile_size = 256, 32
    forward, loss = flops(lambda: LOSSES[name](tile_size=tile_size)(*leaves(name, size)))
    backward, _ = flops(loss.backward)
    if name in TWO_TOWERS:
        assert (forward, backward) == (2 * size**2 * D, 6 * size**2 * D)
    else:  # each pair of 2B rows once, and the tiles on the diagonal in full
        pairs = (2 * size) ** 2 * (1 + tile_size / (2 * size))
        assert (forward, backward) == (pairs * D, 3 * pairs * D)
    untiled, loss = flops(lambda: LOSSES[name]()(*leaves(name, size)))
    rows = size if name in TWO_TOWERS else 2 * size
    assert (untiled, flops(loss.backward)[0]) == (2 * rows**2 * D, 4 * rows**2 * D)


@pytest.mark.parametrize('name', TWO_TOWERS)
def test_a_frozen_tower_costs_no_product(name):
    images, texts = leaves(name, 64)[:2]
    for towers in ((images.detach(), texts), (images, texts.detach())):
        loss = LOSSES[name](tile_size=16)(*towers, 10.0)
        assert flops(loss.backward)[0] == 4 * 64**2 * D


@pytest.mark.parametrize('name', LOSSES)
def test_saved_bytes_hold_no_similarities(name):
    size = 1024
    tensors = leaves(name, size)
    embeddings = 2 * size * D * 4

    def kept(tile_size):
        return saved_bytes(lambda: LOSSES[name](tile_size=tile_size)(*tensors), *tensors)

    matrix = 4 * (size if name in TWO_TOWERS else 2 * size) ** 2
    assert kept(None) > matrix
    # normalising and stacking views keep copies of the embeddings
    copies = {'clip': 0, 'siglip': 0, 'ntxent': 3, 'supcon': 3, 'selfcon': 3}[name]
    assert kept(64) < copies * embeddings + 40 * size
    assert kept(64) < matrix / 4


@pytest.mark.parametrize('name', LOSSES)
def test_live_bytes_are_gradients_and_two_tiles(name):
    """The peak falls with the tile as two tiles do, to copies and gradients of the embeddings."""
    size, tensors = 1024, leaves(name, 1024)
    embeddings = 2 * size * D * 4

    def peak(tile_size):
        for tensor in tensors:
            tensor.grad = None
        loss = LOSSES[name](tile_size=tile_size)
        return allocated_peak_bytes(lambda: loss(*tensors).backward())

    peaks = {tile_size: peak(tile_size) for tile_size in (1024, 512, 64)}
    # panels: rows of a tile, its columns and a few of their numbers
    copies = {'clip': 1, 'siglip': 1, 'ntxent': 5, 'supcon': 6, 'selfcon': 6}[name]
    for tile_size, measured in peaks.items():
        panels = 4 * tile_size * D * 4
        most = copies * embeddings + 2 * tile_size**2 * 4 + panels + 60 * size
        assert measured < most, (tile_size, measured, most)
    assert peaks[1024] - peaks[512] > 1.8 * (1024**2 - 512**2) * 4
    assert peak(None) > 2 * 4 * (size if name in TWO_TOWERS else 2 * size) ** 2


# ------------------------------------------------------------------ ranks


def _costs(rank, world_size, size):
    """FLOPs, bytes saved and received by this rank of forward and backward."""
    results = {}
    for name, kind in LOSSES.items():
        tensors = leaves(name, size // world_size, rank)
        for tile_size in (None, 32):
            loss = kind(tile_size=tile_size)
            loss.process_group = dist.group.WORLD

            def run(loss=loss, tensors=tensors):
                loss(*tensors).backward()

            with ReceivedBytes() as received:
                count, _ = flops(run)
            saved = saved_bytes(run, *tensors)
            results[name, tile_size] = count, saved, received.nbytes
    return results


@pytest.mark.parametrize('world_size', [2, 4])
def test_each_rank_has_its_part(world_size):
    size = 512
    own = size // world_size
    elsewhere = (size - own) * D * 4  # one side's rows that a rank has not
    for results in run_ranks(world_size, _costs, size):
        for name in LOSSES:
            count, saved, received = results[name, 32]
            if name in TWO_TOWERS:
                assert count == 8 * own * size * D
                assert saved < size * D * 4 + 60 * size  # all texts
                assert received < 2 * elsewhere + 20 * size
            else:  # 2 views: the others' rows come, and no gradient goes
                assert count == 6 * (2 * own) * (2 * size) * D
                assert received < 2 * elsewhere + 40 * size
            assert saved < results[name, None][1]
