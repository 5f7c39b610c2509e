"""What is left of a GPU's memory, and what it says of how near the limit is."""

import gc

import pytest
import torch

from memengine.memory import cuda_figures, headroom_bytes

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_to_collect():
    """What other tests have left does not go in the middle of one."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device='cuda')


def test_what_the_allocator_holds_unused_is_left():
    before = headroom_bytes(torch.device('cuda'))
    x = block(64)
    assert headroom_bytes(torch.device('cuda')) == before - 64 * MIB
    del x
    assert headroom_bytes(torch.device('cuda')) == before


def test_a_block_that_waits_for_a_stream_is_not_left(device):
    before, stream = headroom_bytes(torch.device('cuda')), torch.cuda.Stream()
    with device.host_running_ahead():
        x = block(64)
        with torch.cuda.stream(stream):
            x.sum()
        x.record_stream(stream)
        del x
        assert headroom_bytes(torch.device('cuda')) <= before - 64 * MIB
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_retries_and_reserved_memory_are_told(device):
    retries = cuda_figures()['alloc_retries']
    held, taken = torch.cuda.memory_allocated() // MIB, torch.cuda.memory_reserved() // MIB
    with device.memory(taken + 96):
        block(64)  # is cached, and in the way of the next one
        x = block(80)
        torch.cuda.reset_peak_memory_stats()
        figures = cuda_figures()
    assert figures['alloc_retries'] == retries + 1
    assert figures['reserved_mib'] == taken + 80
    assert figures['memory_mib'] // 1 == held + 80
    del x


def test_gaps_are_told():
    torch.cuda.reset_peak_memory_stats()
    parts = [block(2) for _ in range(8)]  # of one block of 20 MiB
    del parts[1::2]
    assert cuda_figures()['fragmented_mib'] >= 8
