"""Codes that are made some elements at a time are those of the whole."""

import pytest
import torch

from memengine.techniques.codecs import bit_packing, lossless, running_range
from memengine.techniques.codecs.bit_packing import pack_bits, pack_truths
from memengine.techniques.codecs.lossless import two_valued
from memengine.techniques.codecs.running_range import RunningRangeQuantizer
from memengine.techniques.modules.private_random import restart_private_generators


@pytest.mark.parametrize('numel', [65, 100, 1000, 1023])
@pytest.mark.parametrize('at_once', [1, 7, 64])
def test_bits(monkeypatch, numel, at_once):
    monkeypatch.setattr(bit_packing, '_MOST_AT_ONCE', at_once)
    flat, asked = torch.randn(numel), []

    def is_positive(elements):
        asked.append(elements.numel())
        return elements > 0

    assert torch.equal(pack_truths(flat, is_positive), pack_bits(flat > 0, 1))
    assert sum(asked) == numel and max(asked) <= at_once


def test_a_third_value_in_a_later_part_is_found(monkeypatch):
    monkeypatch.setattr(lossless, '_SOME_NUMEL', 100)
    monkeypatch.setattr(bit_packing, '_MOST_AT_ONCE', 100)
    values = (torch.randn(5000) > 0).float()
    assert torch.equal(two_valued(values).decode(), values)
    values[4321] = 0.5
    assert two_valued(values) is None


@pytest.mark.parametrize('dim', [0, 1, -1])
@pytest.mark.parametrize('shape', [(6, 3, 5, 4), (7, 5, 3), (4, 9), (1, 2, 3, 40), (1, 1, 90)])
def test_running_ranges(monkeypatch, dim, shape):
    def coded(tensor):
        torch.manual_seed(0)
        restart_private_generators()
        quantizer = RunningRangeQuantizer(dim)
        quantizer(tensor / 2)
        return quantizer(tensor), quantizer.bounds

    tensor = torch.randn(shape)
    whole, bounds = coded(tensor)
    monkeypatch.setattr(running_range, '_PART_NUMEL', 24)
    parts, bounds_of_parts = coded(tensor)
    assert torch.equal(bounds, bounds_of_parts)
    step = (whole.bounds[1] - whole.bounds[0]).max() / 255
    assert (parts.decode() - whole.decode()).abs().max() <= 1.01 * step  # of other noise
    assert parts.decode().stride() == tensor.stride()
