"""Every collective is counted, by what a rank has not; an unknown one is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from memengine.memory.received_bytes import _RULES, ReceivedBytes
from memengine.techniques import shard_model
from memengine.testing import run_ranks
from tests.marks import NEEDS_SHARDING

RANKS, RANK = 4, 1
ROWS = 12  # a tensor's, of one float32 each
ALL = ROWS * 4  # its bytes


@pytest.fixture
def four_ranks():
    """A group that sends nothing."""
    dist.init_process_group('fake', store=FakeStore(), rank=RANK, world_size=RANKS)
    yield
    dist.destroy_process_group()


def rows(count=ROWS):
    return torch.zeros(count)


def tensors(count=RANKS, size=ROWS):
    return [rows(size) for _ in range(count)]


def functionals(call):
    return lambda: functional.wait_tensor(call())


COLLECTIVES = {  # a call, and the bytes that rank 1 of 4 receives
    'all_gather': (lambda: dist.all_gather(tensors(), rows()), 3 * ALL),
    'all_gather_into_tensor': (
        lambda: dist.all_gather_into_tensor(rows(4 * ROWS), rows()),
        3 * ALL,
    ),
    'all_reduce': (lambda: dist.all_reduce(rows()), 2 * ALL * 3 / 4),
    'all_reduce_coalesced': (lambda: dist.all_reduce_coalesced(tensors(2)), 4 * ALL * 3 / 4),
    'all_to_all': (lambda: dist.all_to_all(tensors(), tensors()), 3 * ALL),
    'all_to_all_single': (lambda: dist.all_to_all_single(rows(), rows()), ALL * 3 / 4),
    'all_to_all_single, uneven': (
        lambda: dist.all_to_all_single(rows(10), rows(12), [1, 2, 3, 4], [3, 3, 3, 3]),
        (10 - 2) * 4,
    ),
    'barrier': (dist.barrier, 0),
    'broadcast from here': (lambda: dist.broadcast(rows(), RANK), 0),
    'broadcast': (lambda: dist.broadcast(rows(), 0), ALL),
    'gather': (lambda: dist.gather(rows(), None, 0), 0),
    'gather here': (lambda: dist.gather(rows(), tensors(), RANK), 3 * ALL),
    'irecv': (lambda: dist.irecv(rows(), 0).wait(), ALL),
    'isend': (lambda: dist.isend(rows(), 0).wait(), 0),
    'batch of sends': (
        lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, rows(), 2), dist.P2POp(dist.irecv, rows(), 0)]
            )
        ],
        ALL,
    ),
    'reduce': (lambda: dist.reduce(rows(), 0), ALL * 3 / 4),
    'reduce here': (lambda: dist.reduce(rows(), RANK), 2 * ALL * 3 / 4),
    'reduce_scatter': (lambda: dist.reduce_scatter(rows(), tensors()), 3 * ALL),
    'reduce_scatter_tensor': (
        lambda: dist.reduce_scatter_tensor(rows(), rows(4 * ROWS)),
        3 * ALL,
    ),
    'scatter': (lambda: dist.scatter(rows(), None, 0), ALL),
    'scatter from here': (lambda: dist.scatter(rows(), tensors(), RANK), 0),
    'functional all_gather': (
        functionals(lambda: functional.all_gather_tensor(rows(), 0, dist.group.WORLD)),
        3 * ALL,
    ),
    'functional all_gather coalesced': (
        lambda: functional.all_gather_into_tensor_coalesced(tensors(2), dist.group.WORLD),
        6 * ALL,
    ),
    'functional all_reduce': (
        functionals(lambda: functional.all_reduce(rows(), 'sum', dist.group.WORLD)),
        2 * ALL * 3 / 4,
    ),
    'functional all_to_all': (
        functionals(
            lambda: functional.all_to_all_single(rows(), [1, 2, 3, 4], [3] * 4, dist.group.WORLD)
        ),
        (10 - 2) * 4,
    ),
    'functional all_to_all with a gradient': (
        functionals(
            lambda: functional.all_to_all_single_autograd(
                rows().requires_grad_(), [1, 2, 3, 4], [3] * 4, dist.group.WORLD
            )
        ),
        (10 - 2) * 4,
    ),
    'functional broadcast': (
        functionals(lambda: functional.broadcast(rows(), 0, dist.group.WORLD)),
        ALL,
    ),
    'functional reduce_scatter': (
        functionals(lambda: functional.reduce_scatter_tensor(rows(), 'sum', 0, dist.group.WORLD)),
        ALL * 3 / 4,
    ),
    'functional reduce_scatter coalesced': (
        lambda: functional.reduce_scatter_tensor_coalesced(
            tensors(2), 'sum', [0, 0], dist.group.WORLD
        ),
        2 * ALL * 3 / 4,
    ),
}


def test_a_collective_receives_what_the_rank_has_not(four_ranks):
    for name, (call, expected) in COLLECTIVES.items():
        with ReceivedBytes() as received:
            call()
        assert received.nbytes == expected, name


def test_what_is_coalesced_is_counted_once(four_ranks):
    with ReceivedBytes() as received, dist._coalescing_manager():
        for _ in range(2):
            dist.all_gather_into_tensor(rows(4 * ROWS), rows())
    assert received.nbytes == 6 * ALL
    with ReceivedBytes() as received, dist._coalescing_manager():
        for _ in range(2):
            dist.reduce_scatter_tensor(rows(), rows(4 * ROWS))
    assert received.nbytes == 6 * ALL


def test_an_unknown_collective_is_refused(four_ranks, monkeypatch):
    monkeypatch.delitem(_RULES['c10d'], 'allreduce_')
    with (
        pytest.raises(NotImplementedError, match='how many bytes c10d.allreduce_'),
        ReceivedBytes(),
    ):
        dist.all_reduce(rows())


def test_every_operator_of_this_torch_has_a_rule():
    """But those that only stand in a compiled graph."""
    traced = {'irecv', 'isend', 'batch_p2p_ops'}  # torch.distributed's own are c10d's
    for schema in torch._C._jit_get_all_schemas():
        library, _, name = schema.name.partition('::')
        if library in ('c10d', '_c10d_functional', '_dtensor') and name not in traced:
            assert name in _RULES[library], schema


# ------------------------------------------------------------------ those who call them


def _libraries(rank, world_size):
    width = 64
    layer = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    size = sum(p.nbytes for p in layer.parameters())
    replicated = DistributedDataParallel(layer)
    with ReceivedBytes() as ddp:
        replicated(torch.ones(1, width)).sum().backward()
    assert ddp.nbytes == 2 * size * (world_size - 1) / world_size

    sharded = shard_model(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)), ['0'])
    size = sum(p.numel() * 4 for p in sharded.model.parameters())
    first = sum(p.numel() * 4 for p in sharded.model[0].parameters())
    with ReceivedBytes() as fsdp, sharded.gathered():
        sharded(torch.ones(1, width)).sum().backward()
    # gathered for forward, the unit for backward, too, and reduced; and which parameters were used
    compared = 2 * 16
    assert fsdp.nbytes == (size + first + size + compared) * (world_size - 1) / world_size

    mesh = init_device_mesh('cpu', (world_size,))
    tensor = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    with ReceivedBytes() as dtensor:
        tensor.full_tensor()
    assert dtensor.nbytes == 8 * 8 * 4 * (world_size - 1) / world_size


@NEEDS_SHARDING
def test_ddp_sharding_and_dtensors_are_counted():
    run_ranks(2, _libraries)
