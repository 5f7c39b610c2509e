"""Small integers in bytes: every length and width comes back, in the bytes that were promised."""

import pytest
import torch

from memengine.techniques.codecs.bit_packing import (
    PACKED_BITS,
    pack_bits,
    packed_numel,
    truths_in_order,
    unpack_bits,
)


@pytest.mark.parametrize('bits', PACKED_BITS)
@pytest.mark.parametrize('numel', [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 100, 1025])
def test_values_come_back(bits, numel):
    values = torch.randint(2**bits, (numel,), dtype=torch.uint8)
    before = values.clone()
    packed = pack_bits(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_numel(numel, bits),) == ((numel * bits + 7) // 8,)
    assert torch.equal(unpack_bits(packed, bits, numel), before)
    assert torch.equal(values, before)


@pytest.mark.parametrize('bits', PACKED_BITS)
def test_extremes(bits):
    for fill in (0, 2**bits - 1):
        values = torch.full((13,), fill, dtype=torch.uint8)
        assert torch.equal(unpack_bits(pack_bits(values, bits), bits, 13), values)


def test_booleans_of_any_strides():
    mask = torch.rand(5, 7, 3).permute(2, 0, 1) > 0.5
    unpacked = unpack_bits(pack_bits(mask, 1), 1, mask.numel())
    assert torch.equal(unpacked.view(mask.shape).bool(), mask)


@pytest.mark.parametrize('bits', PACKED_BITS)
def test_out_is_written_to(bits):
    values = torch.randint(2**bits, (21,), dtype=torch.uint8)
    buffer = torch.full((packed_numel(21, bits) + 2,), 255, dtype=torch.uint8)
    packed = pack_bits(values, bits, out=buffer[1:-1])
    assert packed.data_ptr() == buffer.data_ptr() + 1
    assert buffer[0] == buffer[-1] == 255
    assert torch.equal(unpack_bits(packed, bits, 21), values)


@pytest.mark.parametrize('bits', PACKED_BITS)
def test_packed_is_memory_of_its_own(bits):
    values = torch.ones(9, dtype=torch.uint8)
    packed = pack_bits(values, bits)
    values.zero_()
    assert unpack_bits(packed, bits, 9).min() == 1


@pytest.mark.parametrize(('start', 'numel'), [(0, 21), (0, 8), (3, 11), (8, 13), (17, 4), (20, 1)])
def test_bits_in_order(start, numel):
    mask = torch.rand(21) > 0.5
    bits = torch.cat([mask, torch.zeros(3, dtype=torch.bool)]).view(3, 8)
    packed = (bits * 2 ** torch.arange(8)).sum(1).to(torch.uint8)
    assert torch.equal(truths_in_order(packed, start, numel), mask[start : start + numel])
