"""Gather: rows of all ranks, and the gradient that its docstring promises."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from memengine.losses import Gather
from memengine.memory.received_bytes import ReceivedBytes
from memengine.testing import relative_error, run_ranks

D = 3
ROWS = {2: [4, 4], 4: [2, 2, 2, 2]}
UNEVEN = {2: [1, 4], 4: [3, 0, 2, 1]}
SCALE = 3.0


def whole(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(rows), D, dtype=torch.float64, generator=generator)


def part(tensor, rows, rank):
    return tensor.split(rows)[rank]


# ------------------------------------------------------------------ values and sums


def _values(rank, world_size, cut):
    """Values, and gradients of a weighted sum, for several kinds of tensors."""
    rows = cut[world_size]
    x = part(whole(rows), rows, rank).clone().requires_grad_()
    weights = whole(rows, seed=10 + rank)
    kept = weights.clone()
    with ReceivedBytes() as forward:
        everything = Gather(x)
    with ReceivedBytes() as backward:
        everything.backward(weights)
    assert torch.equal(weights, kept), 'the incoming gradient was edited'
    row, others = D * x.itemsize, world_size - 1
    assert forward.nbytes == others * (max(rows) * row + 2 * 8)
    assert backward.nbytes == others * rows[rank] * row
    y = part(whole(rows), rows, rank).clone().requires_grad_()
    Gather(y).sum().backward()  # an expanded gradient
    z = part(whole(rows), rows, rank).clone().requires_grad_()
    Gather(z).T.contiguous().mul(whole(rows, seed=10 + rank).T).sum().backward()
    strided = part(whole(rows), rows, rank).T.contiguous().T
    labels = torch.arange(sum(rows)).split(rows)[rank]
    same = torch.equal(Gather(strided), everything) and not Gather(labels).requires_grad
    half = {
        dtype: Gather(x.detach().to(dtype)).double() for dtype in (torch.bfloat16, torch.float16)
    }
    return everything.detach(), x.grad, y.grad, z.grad, Gather(labels), half, same


@pytest.mark.parametrize('cut', [ROWS, UNEVEN], ids=['even', 'uneven'])
@pytest.mark.parametrize('world_size', [2, 4])
def test_values_and_summed_gradients(world_size, cut):
    rows = cut[world_size]
    everything = whole(rows)
    summed = sum(whole(rows, seed=10 + rank) for rank in range(world_size))
    for rank, result in enumerate(run_ranks(world_size, _values, cut)):
        values, weighted, expanded, strided, labels, half, same = result
        assert torch.equal(values, everything) and same
        assert torch.equal(labels, torch.arange(sum(rows)))
        assert torch.allclose(weighted, part(summed, rows, rank), rtol=1e-14, atol=1e-14)
        assert torch.allclose(strided, part(summed, rows, rank), rtol=1e-14, atol=1e-14)
        assert torch.equal(expanded, torch.full_like(expanded, world_size))
        for dtype, gathered in half.items():
            assert torch.equal(gathered, everything.to(dtype).double())


# ------------------------------------------------------------------ under DDP


def encoder():
    torch.manual_seed(0)
    return nn.Linear(D, D).double()


def own_rows(features, gathered, rows, rank):
    """Cross-entropy of this rank's rows against all columns, as with DisCo-CLIP and open_clip."""
    start = sum(rows[:rank])
    targets = torch.arange(start, start + len(features))
    return F.cross_entropy(SCALE * features @ gathered.T.tanh(), targets)


def all_rows(gathered):
    """The whole batch's loss."""
    return F.cross_entropy(SCALE * gathered @ gathered.T.tanh(), torch.arange(len(gathered)))


class DiscoContract(torch.autograd.Function):
    """DisCo-CLIP's: the mean over ranks of the incoming gradients."""

    @staticmethod
    def forward(ctx, tensor):
        return torch.cat(dist_nn.all_gather(tensor))

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


class OwnContract(DiscoContract):
    """mmpretrain's: this rank's part of its own gradient."""

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


GATHERS = {
    'ours': Gather,
    'open_clip': lambda tensor: torch.cat(dist_nn.all_gather(tensor)),
    'DisCo-CLIP': DiscoContract.apply,
    'mmpretrain': OwnContract.apply,
}


def _under_ddp(rank, world_size):
    """The gradient of the weight, by kind of gather and of loss."""
    rows = ROWS[world_size]
    results = {}
    for name, gather in GATHERS.items():
        for kind in ('own', 'all'):
            model = DistributedDataParallel(encoder())
            features = model(part(whole(rows), rows, rank))
            gathered = gather(features)
            mine = part(gathered, rows, rank) if name == 'DisCo-CLIP' else features
            loss = own_rows(mine, gathered, rows, rank) if kind == 'own' else all_rows(gathered)
            loss.backward()
            results[name, kind] = model.module.weight.grad
    return results


@pytest.mark.parametrize('world_size', [2, 4])
def test_contracts_under_ddp_are_those_of_the_docstring(world_size):
    model = encoder()
    all_rows(model(whole(ROWS[world_size]))).backward()
    true = model.weight.grad
    for results in run_ranks(world_size, _under_ddp):
        for kind in ('own', 'all'):
            assert relative_error(results['ours', kind], true) < 1e-12
            assert relative_error(results['open_clip', kind], true) < 1e-12
            assert relative_error(results['DisCo-CLIP', kind], true / world_size) < 1e-12
        assert relative_error(results['mmpretrain', 'all'], true / world_size) < 1e-12
        # what is missing is no factor
        wrong = results['mmpretrain', 'own']
        cosine = F.cosine_similarity(wrong.flatten(), true.flatten(), dim=0)
        assert cosine < 0.99


# ------------------------------------------------------------------ groups, refusals


def _groups(rank, world_size):
    """Gather within pairs of ranks."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.full((1, 1), float(rank), dtype=torch.float64, requires_grad=True)
    gathered = Gather(x, pairs[rank % 2])
    (gathered * (rank + 1)).sum().backward()
    return gathered.flatten().tolist(), x.grad.item()


def test_a_process_group_is_a_world_of_its_own():
    results = run_ranks(4, _groups)
    assert [values for values, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [grad for _, grad in results] == [1 + 3, 2 + 4, 1 + 3, 2 + 4]


def _mismatched(rank, world_size):
    """Tensors that do not fit, and the messages; gathering goes on afterwards."""
    tensors = {
        'width': torch.zeros(2, 3 + rank),
        'dimensions': torch.zeros([2] * (1 + rank)),
        'type': torch.zeros(2, dtype=(torch.float32, torch.float64)[rank]),
        'gradient': torch.zeros(2, requires_grad=bool(rank)),
        'scalar': torch.zeros(()),
    }
    said = {}
    for name, tensor in tensors.items():
        with pytest.raises(ValueError, match='Gather: the ranks must hold') as error:
            Gather(tensor)
        said[name] = str(error.value)
    assert Gather(torch.ones(1)).tolist() == [1, 1]
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(Gather(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='first derivative only'):
        gradient.sum().backward()
    return said


def test_what_does_not_fit_is_refused_on_every_rank_and_nothing_hangs():
    first, second = run_ranks(2, _mismatched, timeout_s=60.0)
    assert first == second
    assert '(2, 3) torch.float32 requires_grad=False on rank 0' in first['width']
    assert '(2, 4) torch.float32 requires_grad=False on rank 1' in first['width']
    assert '(2,) torch.float32 requires_grad=False on rank 0' in first['dimensions']
    assert 'torch.float64' in first['type']
    assert 'requires_grad=True on rank 1' in first['gradient']
    assert '() torch.float32' in first['scalar']


def test_one_process_gets_its_tensor_back():
    x = torch.ones(2)
    assert Gather(x) is x
