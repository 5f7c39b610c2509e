"""The simulated device behaves as one does, where tests rely on it."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_tensors_of_two_devices_do_not_meet():
    with pytest.raises(RuntimeError, match='two devices, cuda:0 and cpu'):
        torch.ones(2, device='cuda') + torch.ones(2)
    assert (torch.ones(2, device='cuda') + torch.tensor(1.0)).tolist() == [2, 2]


def test_a_copy_on_another_stream_is_late_unless_somebody_waits(device):
    source, copy = torch.ones(4, device='cuda'), torch.zeros(4, pin_memory=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
    assert copy.tolist() == [0] * 4
    stream.synchronize()
    assert copy.tolist() == [1] * 4


def test_memory_is_as_small_as_a_test_says(device):
    with device.memory(8):
        with pytest.raises(torch.OutOfMemoryError, match='Tried to allocate 16'):
            torch.empty(16 * 2**20, dtype=torch.uint8, device='cuda')
    torch.empty(16 * 2**20, dtype=torch.uint8, device='cuda')


def test_what_another_stream_used_is_not_free_until_the_host_knows(device):
    def reserved_mib():
        with device.counted() as counts:
            for _ in range(8):
                x = torch.empty(4 * 2**20, dtype=torch.uint8, device='cuda')
                with torch.cuda.stream(stream):
                    x.sum()
                x.record_stream(stream)
        return counts.peak_reserved_mib

    stream = torch.cuda.Stream()
    with device.host_running_ahead():
        assert reserved_mib() >= 32
    torch.cuda.synchronize()


def test_kernels_and_waits_are_counted_with_their_lines(device):
    x = torch.ones(3, device='cuda', requires_grad=True)
    with device.counted() as counts:
        loss = (x * 2).sum()
        loss.item(), x[x > 0]
    assert counts.kernels['aten::mul.Tensor'] == 1
    assert sum(counts.waits.values()) == 2
    assert all('tests/simulated_gpu/test_device.py' in line for line in counts.waits)


def test_the_nth_allocation_is_refused(device):
    with device.refusing(2):
        first = torch.empty(1, device='cuda')
        with pytest.raises(torch.OutOfMemoryError, match='out of memory'):
            first + 1
        assert device.allocations() == 2
    assert first.device.type == 'cuda'
