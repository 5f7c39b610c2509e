"""The losses over ranks: on each the whole batch's value, and after DDP's mean its gradient."""

import itertools

import pytest
import torch
import torch.distributed as dist

from memengine.losses import ClipLoss, ConLoss, NTXentLoss, SigLipLoss, SupConLoss
from memengine.testing import assert_same_step, run_ranks

from .cases import CASES, learned, step

TILES = [None, 3, 'auto']
PRECISIONS = ['auto', 'bf16']
ROWS = {
    'even': {2: [4, 4], 4: [2, 2, 2, 2]},
    'uneven': {2: [3, 5], 4: [1, 3, 2, 2]},
}


def whole(name):
    torch.manual_seed(0)
    return CASES[name].tensors(8)


def part(tensors, rows, rank):
    return {k: v.split(rows)[rank] if v.dim() else v for k, v in tensors.items()}


def _steps(rank, world_size, rows):
    """Loss and gradients of this rank, of each case, tile size and precision."""
    results = {}
    for name, case in CASES.items():
        tensors = part(whole(name), rows, rank)
        for tile_size, precision in itertools.product(TILES, PRECISIONS):
            loss = case.make(tile_size)
            loss.process_group, loss.precision = dist.group.WORLD, precision
            found = step(lambda t, c=case, m=loss: c.call(m, t), tensors)
            results[name, tile_size, precision] = found
    return results


def alone(case, tensors, precision):
    """What ranks are to give, and how near to it."""
    if precision == 'auto':
        return step(case.formula, tensors), 1e-10
    loss = case.make(None)
    loss.precision = precision
    return step(lambda t: case.call(loss, t), tensors), 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize('cut', ROWS)
@pytest.mark.parametrize('world_size', [2, 4])
def test_ranks_equal_one_process(world_size, cut):
    rows = ROWS[cut][world_size]
    results = run_ranks(world_size, _steps, rows)
    for name, case in CASES.items():
        tensors = whole(name)
        for tile_size, precision in itertools.product(TILES, PRECISIONS):
            expected, tolerance = alone(case, tensors, precision)
            ranks = [result[name, tile_size, precision] for result in results]
            for rank in ranks:
                assert_same_step({'loss': rank['loss']}, {'loss': expected['loss']}, tolerance)
            mean = {'loss': ranks[0]['loss']}
            for key in learned(tensors):
                parts = [rank[key] / world_size for rank in ranks]
                mean[key] = torch.cat(parts) if tensors[key].dim() else sum(parts)
            assert_same_step(mean, expected, tolerance)


def _groups(rank, world_size):
    """The gradient of CLIP's loss within pairs of ranks, and with a group of one."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = [dist.new_group([single]) for single in range(world_size)]
    tensors = part(whole('clip'), [2, 2, 2, 2], rank)
    loss = ClipLoss(tile_size=3)
    results = []
    for group in (pairs[rank % 2], alone[rank], None):
        loss.process_group = group
        results.append(step(lambda t: loss(*t.values()), tensors))
    return results


def test_a_group_is_a_batch_of_its_own():
    case, parts = CASES['clip'], [part(whole('clip'), [2, 2, 2, 2], rank) for rank in range(4)]
    results = run_ranks(4, _groups)
    for first, second in ((0, 2), (1, 3)):
        pair = {k: torch.cat([parts[first][k], parts[second][k]]) for k in ('images', 'texts')}
        expected = step(case.formula, {**pair, 'scale': parts[0]['scale']})
        ranks = results[first][0], results[second][0]
        mean = {k: torch.cat([rank[k] / 2 for rank in ranks]) for k in ('images', 'texts')}
        mean |= {'loss': ranks[0]['loss'], 'scale': (ranks[0]['scale'] + ranks[1]['scale']) / 2}
        assert_same_step(mean, expected, 1e-10)
    for rank in range(4):
        expected = step(case.formula, parts[rank])
        assert_same_step(results[rank][1], expected, 1e-10)
        assert_same_step(results[rank][2], expected, 1e-10)


def _mismatched(rank, world_size):
    """What is said of ranks whose rows do not fit together; the loss works afterwards."""
    said = []
    for tile_size in (None, 3):
        clip, supcon = ClipLoss(tile_size=tile_size), SupConLoss(tile_size=tile_size)
        clip.process_group = supcon.process_group = dist.group.WORLD
        calls = [
            lambda clip=clip: clip(torch.ones(2, 3 + rank), torch.ones(2, 3 + rank), 1.0),
            lambda supcon=supcon: supcon(torch.ones(2, 2 + rank, 3)),
            lambda supcon=supcon: supcon(torch.ones(2, 2, 3), mask=torch.ones(2, 2)),
        ]
        for call in calls:
            with pytest.raises(ValueError, match='must') as error:
                call()
            said.append(str(error.value))
        assert clip(torch.eye(2), torch.eye(2), 1.0) > 0
    return said


def test_what_does_not_fit_is_refused_on_every_rank():
    first, second = run_ranks(2, _mismatched, timeout_s=60.0)
    assert first == second
    for features, views, mask in (first[:3], first[3:]):
        assert '(2, 3)' in features and '(2, 4)' in features
        assert '(2, 2, 3)' in views and '(2, 3, 3)' in views
        assert '[2, 4], got (2, 2)' in mask


def _one_refuses(rank, world_size):
    """What is said on each rank when only the second is called wrongly, or unlike the first."""
    alone = bool(rank)
    rows, pairs = torch.randn(0 if alone else 3, 2, 4), torch.randn(3, 2, 4)
    learned = torch.randn(3, 4, requires_grad=alone)
    labels, mask = torch.zeros(3), torch.ones(3, 6)
    said = {}
    for tile_size in (None, 2):
        losses = [kind(tile_size=tile_size) for kind in (ClipLoss, SigLipLoss, NTXentLoss)]
        supcon, selfcon = SupConLoss(tile_size=tile_size), ConLoss(tile_size=tile_size)
        clip, siglip, ntxent = losses
        unlike = ClipLoss(tile_size=2 if alone else None)
        for loss in (*losses, supcon, selfcon, unlike):
            loss.process_group = dist.group.WORLD
        calls = {
            'no rows, clip': lambda m=clip: m(rows[:, 0], rows[:, 1], 1.0),
            'no rows, siglip': lambda m=siglip: m(rows[:, 0], rows[:, 1], 1.0),
            'no rows, ntxent': lambda m=ntxent: m(rows[:, 0], rows[:, 1]),
            'no rows, supcon': lambda m=supcon: m(rows),
            'no rows, selfcon': lambda m=selfcon: m(rows),
            'short labels': lambda m=supcon: m(pairs, labels[: 3 - rank]),
            'labels and mask': lambda m=supcon: m(pairs, labels, mask if alone else None),
            'flat mask': lambda m=supcon: m(pairs, mask=mask.flatten() if alone else mask),
            'labels': lambda m=supcon: m(pairs, labels if alone else None),
            'type': lambda m=supcon: m(pairs, labels.int() if alone else labels.long()),
            'mask': lambda m=selfcon: m(pairs, mask=mask if alone else None),
            'columns': lambda m=supcon: m(pairs, mask=mask[:, rank:]),
            'option': lambda m=selfcon: m(pairs, supcon_s=alone),
            'gradient': lambda m=clip: m(learned, pairs[:, 1], 1.0),
            'tiles': lambda m=unlike: m(pairs[:, 0], pairs[:, 1], 1.0),
        }
        for name, call in calls.items():
            with pytest.raises(ValueError, match='refused on all ranks|call it alike') as error:
                call()
            said[name, tile_size] = str(error.value)
        assert clip(torch.eye(2), torch.eye(2), 1.0) > 0
    return said


def test_what_one_rank_refuses_all_refuse():
    first, second = run_ranks(2, _one_refuses, timeout_s=60.0)
    assert first == second
    for (name, _), said in first.items():
        if name in ('labels', 'type', 'mask', 'columns', 'option', 'gradient', 'tiles'):
            assert 'the ranks must call it alike' in said, name
            assert 'on rank 0' in said and 'on rank 1' in said
        else:
            assert said.startswith('refused on all ranks: '), name
            assert said.endswith(' on rank 1') and 'on rank 0' not in said
    assert 'labels of torch.int64' in first['type', None] and 'int32' in first['type', None]
    assert '(0, 4)' in first['no rows, clip', None]
    assert 'labels must be one per sample, [3], got (2,)' in first['short labels', 2]


def _second_derivative(rank, world_size):
    """Messages of a second derivative through losses over ranks, in tiles and not."""
    said = []
    for tile_size in (None, 2):
        loss = ClipLoss(tile_size=tile_size)
        loss.process_group = dist.group.WORLD
        images, weight = torch.eye(2).requires_grad_(), torch.ones((), requires_grad=True)
        value = loss(images, torch.eye(2), 3.0) * weight
        (gradient,) = torch.autograd.grad(value, images, create_graph=True)
        for leaf in (images, weight):
            with pytest.raises(RuntimeError, match='first derivative only') as error:
                torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)
            said.append(str(error.value))
    return said


def test_a_second_derivative_over_ranks_is_refused():
    for said in run_ranks(2, _second_derivative):
        assert len(said) == 4
