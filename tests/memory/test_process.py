"""Resident memory of the process, against memory that is really taken."""

import math
import mmap
import sys

import pytest
import torch

from memengine.memory import cuda_peak_mib, held_bytes, peak_rss_mib, rss_mib


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_resident_memory_grows_by_what_is_touched_and_falls_when_freed():
    before = rss_mib()
    block = mmap.mmap(-1, 64 * 2**20)  # which no allocator has at hand
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    during = rss_mib()
    assert 60 <= during - before <= 80
    peak = peak_rss_mib()
    assert peak >= during - 1
    block.close()
    assert rss_mib() < during - 50
    assert peak_rss_mib() >= peak - 1


def test_resident_memory_is_unknown_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr('memengine.memory.process._STATM', tmp_path / 'statm')
    assert rss_mib() is None


def test_page_counts_are_turned_into_mib(monkeypatch, tmp_path):
    import resource

    (tmp_path / 'statm').write_text('1000 512 30 1 0 20 0\n')
    monkeypatch.setattr('memengine.memory.process._STATM', tmp_path / 'statm')
    assert math.isclose(rss_mib(), 512 * resource.getpagesize() / 2**20)


@pytest.mark.gpu
def test_cuda_peak():
    torch.cuda.reset_peak_memory_stats()
    before = cuda_peak_mib()
    block = torch.empty(64 * 2**20, dtype=torch.uint8, device='cuda')
    assert math.isclose(cuda_peak_mib() - before, 64, abs_tol=2)
    del block
    assert math.isclose(cuda_peak_mib() - before, 64, abs_tol=2)


def test_what_is_held_from_step_to_step():
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20))
    weights = 4 * (10 * 20 + 20 + 2 * 20)
    optimizer = torch.optim.AdamW(model.parameters())
    buffers = 4 * 2 * 20 + 8
    assert held_bytes(model, optimizer) == dict(weights=weights, buffers=buffers, optimizer=0)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    steps = 4 * len([*model.parameters()])
    assert held_bytes(model, optimizer)['optimizer'] == 2 * weights + steps
    model[0].weight = torch.nn.Parameter(model[0].weight.detach())
    model.append(torch.nn.Linear(10, 20))
    model[2].weight = model[0].weight  # tied
    assert held_bytes(model)['weights'] == weights + 4 * 20
