"""A step that runs out of memory at any of its allocations is the smaller slices' step."""

import copy
import gc
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memengine._torch_private.distributed import FORGETS_SHARDED_STEPS
from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper, sliced
from memengine.engine.step import run_step
from memengine.losses import NTXentLoss
from memengine.models import SimCLR
from memengine.techniques import Tower, additive_step, cached_step, split_batch
from memengine.techniques.sharding.shard_model import shard_model
from memengine.techniques.slices.out_of_memory import run_until_it_fits
from tests.engine.test_sliced import data_of, wrap
from tests.engine.test_sliced_exactness import BATCHNORM, DROPOUT
from tests.models.test_dino import build as build_dino
from tests.models.toy import VIT, build

pytestmark = pytest.mark.gpu
MIB = 2**20
STRIDE = 23  # all places of an algorithm's step take minutes


@pytest.fixture(autouse=True)
def only_what_the_test_makes():
    """Is looked through for cycles, which hold memory until then."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def small_network():
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
    return nn.Sequential(*layers).to('cuda', torch.float64)


def accumulate(model, images, size):
    additive_step(split_batch(images, size), lambda x: model(x).square().sum(), modules=[model])


def cache(model, images, size):
    loss = NTXentLoss(0.5)
    cached_step(Tower(model, split_batch(images, size)), lambda z: loss(*z.chunk(2)))


def state_of(model):
    """Gradients, buffers and generators."""
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    generators = torch.cuda.get_rng_state(), torch.get_rng_state()
    return [*gradients.values(), *(b.clone() for b in model.buffers()), *generators]


@pytest.mark.parametrize('step', [accumulate, cache])
def test_at_every_allocation_of_a_step(device, step):
    """The second iteration of two whose gradients are accumulated."""

    def train(size, refused=0):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, sizes = small_network(), [size, 2]
        images = torch.rand(8, 3, dtype=torch.float64).cuda()
        torch.manual_seed(1)
        step(model, images, 2)
        with device.refusing(refused):
            run_until_it_fits(
                lambda: step(model, images, sizes[0]), lambda: bool(sizes.pop(0)), model
            )
            count = device.allocations()
        return sizes[0], count, state_of(model), torch.cuda.memory_allocated() - before

    (_, count, *large), (_, _, *small) = train(4), train(2)
    assert count > 50
    repeated = 0
    for refused in range(1, count + 1):
        size, _, *found = train(4, refused)
        expected = small if size == 2 else large  # a copy went to the host
        assert all(map(torch.equal, found[0], expected[0]))
        assert found[1] == expected[1]
        repeated += size == 2
    assert 0 < count - repeated < 20


def simclr():
    backbone = {**VIT, 'depth': 1, **DROPOUT}
    model = build(SimCLR, backbone=backbone, **BATCHNORM)
    return model, wrap(model, GradCacheOptimWrapper, optimizer='SGD', chunk_size=4), 2


def dino():
    model = build_dino(backbone=dict(depth=1, **DROPOUT))
    return model, wrap(model, AccumulationOptimWrapper, optimizer='SGD', micro_batch_size=2), 1


@pytest.mark.slow
@pytest.mark.parametrize(('make', 'kind'), [(simclr, SimCLR), (dino, 'DINO')])
def test_at_many_allocations_of_an_algorithm(device, make, kind, monkeypatch):
    """But those of what is not cut into slices: the batch and the update."""
    places = []

    def noted(*args):
        places.append(device.allocations())
        losses = run_until_it_fits(*args)
        places.append(device.allocations())
        return losses

    monkeypatch.setattr(sliced, 'run_until_it_fits', noted)
    model, wrapper, size = make()
    model.cuda()
    start, data = copy.deepcopy(model.state_dict()), data_of(kind)

    def train(size, refused=0):
        """The size in the end; weights, buffers and generators after it; bytes that it left."""
        gc.collect()
        before = torch.cuda.memory_allocated()
        model.load_state_dict(start)
        wrapper.size = size
        torch.manual_seed(1)
        with device.refusing(refused):
            run_step(model, data, wrapper)
        left = torch.cuda.memory_allocated() - before
        values = model.state_dict().values()
        state = [value.cpu() for value in values] + [torch.cuda.get_rng_state()]
        return wrapper.size, state, left

    train(size)
    _, large, left = train(2 * size)
    first, last = places[-2:]
    _, small, _ = train(size)
    halved = 0
    for refused in range(first + 1, last + 1, STRIDE):
        found, state, found_left = train(2 * size, refused)
        halved += found == size
        assert all(map(torch.equal, state, small if found == size else large))
        assert found_left == left
    assert halved > 10


@pytest.fixture
def alone(tmp_path):
    """A group of this process only."""
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/rank', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_gives_its_buckets_away_before_it_makes_others(alone):
    model = DistributedDataParallel(nn.Linear(1024, 4096, bias=False).cuda())  # 16 MiB
    x, starts, peaks = torch.ones(1, 1024, device='cuda'), [], []

    def step():
        starts.append(torch.cuda.memory_allocated())
        peaks.append(torch.cuda.max_memory_allocated())
        model(x).sum().backward()
        if len(starts) == 3:
            raise torch.OutOfMemoryError('CUDA out of memory.')

    def shrink():
        deadline = time.monotonic() + 10  # for backward's thread, to let go of its last tensor
        while torch.cuda.memory_allocated() > starts[2] and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # something else may have been let go before it
        torch.cuda.reset_peak_memory_stats()
        return True

    step()
    step()  # in which DDP has ordered them
    run_until_it_fits(step, shrink, model)
    assert peaks[3] < starts[2] + 8 * MIB


@pytest.mark.skipif(not FORGETS_SHARDED_STEPS, reason='this torch cannot repeat a sharded step')
def test_at_many_allocations_of_a_step_whose_shards_are_offloaded(device, alone):
    """Parameters are on the host; dropout is drawn on the device all the same."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 32), nn.Dropout(), nn.Linear(32, 8))
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(2)))
    sharded = shard_model(model, device='cuda', offload=True)
    images = torch.rand(8, 8, device='cuda')

    def train(size, refused=0):
        sizes = [size, 2]
        model.zero_grad()
        torch.manual_seed(1)

        def step():
            with sharded.gathered():
                for piece in images.split(sizes[0]):
                    sharded(piece).square().sum().backward()

        with device.refusing(refused):
            run_until_it_fits(step, lambda: bool(sizes.pop(0)), model)
            count = device.allocations()
        return sizes[0], count, [p.grad.to_local().clone() for p in model.parameters()]

    (_, count, large), (_, _, small) = train(4), train(2)
    repeated = 0
    for refused in range(1, count + 1, STRIDE):
        size, _, found = train(4, refused)
        repeated += size == 2
        assert all(map(torch.equal, found, small if size == 2 else large))
    assert repeated > 2


@pytest.mark.slow
def test_two_ranks_of_which_one_runs_out_anywhere(device, tmp_path):
    """In forward, in the loss over both, in backward's threads, while DDP makes its buckets."""
    command = [sys.executable, '-m', 'tests.simulated_gpu.two_ranks']
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_at_every_allocation_of_a_first_step_in_fp16(device):
    """In which the gradient scaler makes its state."""

    def train(size, refused=0):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).cuda()
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        wrapper = AccumulationOptimWrapper(optimizer, 4, precision='fp16')
        images, sizes = torch.rand(8, 3).cuda(), [size, 2]

        def step():
            with wrapper.precision.autocast():
                losses = [network(part).square().mean() for part in images.split(sizes[0])]
            for loss in losses:
                wrapper.add_gradient(loss / len(losses))

        with device.refusing(refused):
            run_until_it_fits(step, lambda: bool(sizes.pop(0)), network)
            count = device.allocations()
        wrapper.finish_step(torch.zeros((), device='cuda'))
        return sizes[0], count, [p.detach().clone() for p in network.parameters()]

    (_, count, _), (_, _, small) = train(4), train(2)
    repeated = 0
    for refused in range(1, count + 1):
        size, _, found = train(4, refused)
        if size == 2:
            repeated += 1
            assert all(map(torch.equal, found, small))
    assert repeated > count / 2
