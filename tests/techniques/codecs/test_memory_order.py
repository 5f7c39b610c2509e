"""Elements as they lie in memory, each once, and back."""

import pytest
import torch

from memengine.techniques.codecs.memory_order import in_memory_order

BASE = torch.arange(120.0).view(2, 3, 4, 5)


@pytest.mark.parametrize(
    'values',
    [
        BASE,
        BASE.to(memory_format=torch.channels_last),
        BASE.permute(3, 0, 2, 1),
        BASE[1:],
        BASE[:1].to(memory_format=torch.channels_last),
        torch.tensor(1.0),
        torch.empty(0, 3),
    ],
)
def test_dense_tensors_are_seen_without_a_copy(values):
    flat, order = in_memory_order(values)
    assert flat.data_ptr() == values.data_ptr()
    assert flat.numel() == order.numel == values.numel()
    back = order.shaped(flat)
    assert torch.equal(back, values)
    assert back.stride() == values.stride()


@pytest.mark.parametrize(
    ('values', 'numel'),
    [
        (torch.randn(2, 1, 4).expand(2, 3, 4), 8),
        (torch.randn(()).expand(5, 5), 1),
        (torch.randn(4, 1).t().expand(3, 4), 4),
        (torch.randn(3, 1).expand(3, 0), 0),
    ],
)
def test_what_is_expanded_counts_once(values, numel):
    flat, order = in_memory_order(values)
    assert flat.numel() == order.numel == numel
    assert torch.equal(order.shaped(flat), values)
    assert order.shaped(flat).stride() == values.stride()


@pytest.mark.parametrize(
    'values', [BASE[..., ::2], BASE[:, 1:].transpose(1, 2), torch.arange(9.0).unfold(0, 4, 2)]
)
def test_gaps_and_overlaps_are_copied(values):
    flat, order = in_memory_order(values)
    assert flat.numel() == order.numel == values.numel()
    back = order.shaped(flat)
    assert torch.equal(back, values)
    assert back.stride() == values.clone().stride()


def test_no_graph_is_held():
    flat, _ = in_memory_order(torch.ones(3, requires_grad=True) * 2)
    assert flat.grad_fn is None and not flat.requires_grad
