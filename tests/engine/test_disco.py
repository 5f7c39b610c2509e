"""Ranks under DisCoDistributedDataParallel take the steps of one process with the whole batch."""

import copy
import os
import re

import pytest
import torch
from torch import nn

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper, OptimWrapper
from memengine.engine.step import run_step
from memengine.engine.wrappers import DisCoDistributedDataParallel, MMDistributedDataParallel
from memengine.losses import Gather, NTXentLoss
from memengine.models import CLIP, Classifier, SelfCon, SigLIP, SimCLR, SupCon
from memengine.techniques.layers.sync_batchnorm import SyncedBatchNorm
from memengine.techniques.slices.slicing import take
from memengine.testing import assert_same_step, relative_error, run_ranks
from tests.engine.toy import Losses, toy_runner
from tests.losses.test_gather import DiscoContract
from tests.models.toy import HEAD, batch, build

B = 8  # samples of all ranks together
STEPS = 4
EVEN = {2: [4, 4], 4: [2, 2, 2, 2]}
UNEVEN = {2: [3, 5], 4: [1, 3, 1, 3]}
ALL = range(B)

LOSSES = {
    SimCLR: 'NTXentLoss',
    SupCon: 'SupConLoss',
    SelfCon: 'ConLoss',
    CLIP: 'ClipLoss',
    SigLIP: 'SigLipLoss',
}
WAYS = {
    'plain': {},
    'in tiles': dict(tile_size=3),
    'plain gradient': dict(sgd=True),  # Adam and clipping do not see a wrong factor
    'gradient in slices': dict(sgd=True, optim=GradCacheOptimWrapper, chunk_size=2, tile_size=2),
    'gradient cache': dict(optim=GradCacheOptimWrapper, chunk_size=1, tile_size=2),
    'gradient cache with graphs': dict(optim=GradCacheOptimWrapper, chunk_size=3, keep_graph=1),
    'over iterations': dict(optim=OptimWrapper, accumulative_counts=2, accumulate_coupled=True),
}


def data_of(kind, seed, rows, dtype=torch.float64):
    """Some samples of a batch, as the data loader gives them."""
    inputs, samples = batch(kind, batch_size=B, seed=seed)
    inputs = take(dict(enumerate(inputs)), rows) if isinstance(inputs, list) else take(inputs, rows)
    if isinstance(inputs, dict):
        inputs = [view.to(dtype) for view in inputs.values()]
    else:
        inputs = inputs.to(dtype)
    return dict(inputs=inputs, data_samples=take(samples, rows))


def rows_of(rank, sizes):
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def train(model, kind, rows, optim=OptimWrapper, dtype=torch.float64, sgd=False, **settings):
    """Losses of each step, and parameters and buffers after all of them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if sgd:
        wrapper = optim(torch.optim.SGD(parameters, lr=0.1), **settings)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        wrapper = optim(optimizer, clip_grad=dict(max_norm=0.5), **settings)
    losses = [
        run_step(model, data_of(kind, seed, rows, dtype), wrapper)['loss'] for seed in range(STEPS)
    ]
    module = getattr(model, 'module', model)
    return torch.stack(losses).detach(), {k: v.detach() for k, v in module.state_dict().items()}


# ------------------------------------------------------------------ every algorithm


def follow(way, kind, rows, wrapper=None):
    """Train one of the algorithms in one of the ways."""
    settings = dict(WAYS[way])
    model = build(kind, loss=dict(type=LOSSES[kind], tile_size=settings.pop('tile_size', None)))
    return train(wrapper(model) if wrapper else model, kind, rows, **settings)


def _every_algorithm(rank, world_size, sizes, ways):
    """Every algorithm in every way, as starting ranks takes longest."""
    rows, results = rows_of(rank, sizes), {}
    for kind in LOSSES:
        for way in ways:
            results[kind, way] = follow(way, kind, rows, DisCoDistributedDataParallel)
        results[kind, 'local'] = follow('plain', kind, rows, MMDistributedDataParallel)
    return results


@pytest.mark.parametrize(
    ('sizes', 'ways'),
    [
        (EVEN[2], list(WAYS)),
        (UNEVEN[2], ['plain', 'plain gradient', 'gradient in slices']),
        pytest.param(EVEN[4], list(WAYS), marks=pytest.mark.slow),
        pytest.param(
            UNEVEN[4], ['plain', 'plain gradient', 'gradient in slices'], marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_ranks_follow_one_process_with_the_whole_batch(sizes, ways):
    ranks = run_ranks(len(sizes), _every_algorithm, sizes, ways)
    for kind in LOSSES:
        for way in ways:
            losses, state = follow(way, kind, ALL)
            for results in ranks:
                assert relative_error(results[kind, way][0], losses) < 1e-10
                assert_same_step(results[kind, way][1], state)
        # and the comparison sees it when each rank contrasts its own samples
        _, state = follow('plain', kind, ALL)
        with pytest.raises(AssertionError, match='tensors differ'):
            assert_same_step(ranks[0][kind, 'local'][1], state)


# ------------------------------------------------------------------ a loss of one's own


class OwnLoss(nn.Module):
    """Takes part by an attribute; the whole loss on every rank, through a gather."""

    def __init__(self, gather=Gather):
        super().__init__()
        self.gather = gather
        self.process_group = None
        self.loss = NTXentLoss(temperature=0.2)

    def forward(self, view1, view2):
        if self.process_group is not None:
            view1, view2 = self.gather(view1), self.gather(view2)
        return self.loss(view1, view2)


class WithPenalty(SimCLR):
    """Another loss beside it, the mean over samples."""

    def embedding_loss(self, embeddings, targets, data_samples=None):
        losses = super().embedding_loss(embeddings, targets, data_samples)
        return {**losses, 'penalty_loss': embeddings.square().mean()}


def with_penalty():
    torch.manual_seed(0)
    model = build(SimCLR)
    model.__class__ = WithPenalty
    return model


SLICED = dict(optim=GradCacheOptimWrapper, chunk_size=2)
FROZEN = {f'frozen {tower}': dict(embed_dim=None, frozen=[tower]) for tower in ('image', 'text')}
BATCH_NORM = dict(head={**HEAD, 'use_bn': True})


def frozen_clip(tile_size, **changes):
    return build(CLIP, loss=dict(type='ClipLoss', tile_size=tile_size), **changes)


def _variants(rank, world_size):
    rows = rows_of(rank, EVEN[world_size])
    own, factor = (
        train(
            DisCoDistributedDataParallel(build(SimCLR, loss=OwnLoss(gather))),
            SimCLR,
            rows,
            sgd=True,
        )
        for gather in (Gather, DiscoContract.apply)
    )
    penalty, sliced = (
        train(DisCoDistributedDataParallel(with_penalty()), SimCLR, rows, sgd=True, **settings)
        for settings in ({}, SLICED)
    )
    model = build(SimCLR, **BATCH_NORM)
    SyncedBatchNorm(model)
    batch_norm = train(DisCoDistributedDataParallel(model), SimCLR, rows)
    frozen = {
        f'{name} {tile_size}': train(
            DisCoDistributedDataParallel(frozen_clip(tile_size, **changes)), CLIP, rows
        )
        for name, changes in FROZEN.items()
        for tile_size in (None, 3)
    }
    return dict(
        own=own, factor=factor, penalty=penalty, sliced=sliced, batch_norm=batch_norm, **frozen
    )


@pytest.mark.edge(
    'disco',
    'exact',
    'One’s own loss, another loss beside it, batch statistics over ranks, frozen towers',
)
def test_ones_own_loss_another_loss_batchnorm_and_frozen_towers():
    expected = dict(
        own=train(build(SimCLR, loss=OwnLoss()), SimCLR, ALL, sgd=True),
        penalty=train(with_penalty(), SimCLR, ALL, sgd=True),
        sliced=train(with_penalty(), SimCLR, ALL, sgd=True, **SLICED),
        batch_norm=train(build(SimCLR, **BATCH_NORM), SimCLR, ALL),
    )
    for name, changes in FROZEN.items():
        for tile_size in (None, 3):
            plain = train(frozen_clip(None, **changes), CLIP, ALL)
            expected[f'{name} {tile_size}'] = plain
    del expected['batch_norm'][1]['backbone.model.norm.bias']
    for results in run_ranks(2, _variants):
        with pytest.raises(AssertionError, match='tensors differ'):  # 1/N of the gradient is seen
            assert_same_step(results['factor'][1], expected['own'][1])
        for name, (losses, state) in expected.items():
            actual = results[name][1]
            if name == 'batch_norm':  # its gradient is rounding, which AdamW blows up
                del actual['backbone.model.norm.bias']
            assert_same_step(actual, state)
            if name not in ('penalty', 'sliced'):  # the logged sum holds the rank's own penalty
                assert relative_error(results[name][0], losses) < 1e-10


# ------------------------------------------------------------------ precision


def _precisions(rank, world_size):
    results = {}
    for precision in ('fp32', 'bf16', 'fp16'):
        for optim, settings in (
            (OptimWrapper, {}),
            (GradCacheOptimWrapper, dict(chunk_size=2)),
        ):
            model = DisCoDistributedDataParallel(build(CLIP).float())
            options = dict(optim=optim, precision=precision, dtype=torch.float32, **settings)
            results[precision, optim] = train(
                model, CLIP, rows_of(rank, EVEN[world_size]), **options, **SCALE
            )
    return results


SCALE = dict(loss_scale=2.0**7)


@pytest.mark.slow
def test_precisions_take_the_steps_of_one_process():
    ranks = run_ranks(2, _precisions)
    start = build(CLIP).float().state_dict()
    for precision, optim in ranks[0]:
        settings = dict(chunk_size=2) if optim is GradCacheOptimWrapper else {}
        options = dict(optim=optim, precision=precision, dtype=torch.float32, **settings)
        losses, state = train(build(CLIP).float(), CLIP, ALL, **options, **SCALE)
        for results in ranks:
            assert torch.allclose(results[precision, optim][0], losses, rtol=1e-2)
            for name, expected in state.items():
                moved = (expected - start[name]).norm()
                off = (results[precision, optim][1][name] - expected).norm()
                assert off <= (1e-2 if precision == 'fp32' else 0.3) * moved, (precision, name)
        for name in state:  # the ranks stay together, to the bit
            assert torch.equal(*(r[precision, optim][1][name] for r in ranks))


# ------------------------------------------------------------------ through the Runner


class Pairs(torch.utils.data.Dataset):
    """Two noisy views of each of 16 images."""

    metainfo = {}

    def __len__(self):
        return 16

    def __getitem__(self, index):
        image = torch.full((1, 8, 8), index / 16, dtype=torch.float64)
        views = [image + torch.randn(1, 8, 8, dtype=torch.float64) for _ in range(2)]
        return dict(inputs=views, data_samples=dict(label=index % 3, index=index))


def run(work_dir, world_size, model, wrapper='DisCoDistributedDataParallel'):
    losses = Losses()
    runner = toy_runner(
        work_dir,
        losses,
        loader=dict(dataset=Pairs(), batch_size=8 // world_size),
        launcher='pytorch' if world_size > 1 else 'none',
        custom_hooks=[losses, dict(type='EMAHook')],
        log_level='INFO',
        model=model,
        cfg=dict(model_wrapper_cfg=dict(type=wrapper)),
    )
    runner.train()
    (ema,) = (hook for hook in runner.hooks if type(hook).__name__ == 'EMAHook')
    model = getattr(runner.model, 'module', runner.model)
    average = {f'ema.{k}': v for k, v in ema.ema_model.state_dict().items()}
    return losses.seen, {**model.state_dict(), **average}, type(runner.model).__name__


def _through_the_runner(rank, world_size, work_dir):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    with pytest.raises(ValueError, match="Classifier has no contrastive loss.*'MMDistributedData"):
        run(f'{work_dir}/refused', world_size, build(Classifier))
    ours = run(f'{work_dir}/ours', world_size, build(SimCLR))
    theirs = run(f'{work_dir}/theirs', world_size, build(SimCLR), 'MMDistributedDataParallel')
    return ours, theirs


def log_of(folder):
    (path,) = folder.glob('*/*.log')
    return path.read_text()


def test_a_run_on_two_ranks_is_the_run_on_one_and_says_what_it_does(tmp_path):
    seen, state, wrapper = run(tmp_path / 'one', 1, build(SimCLR))
    assert wrapper == 'SimCLR'
    said = log_of(tmp_path / 'one')
    assert "model_wrapper_cfg has no effect in one process (launcher='none'): loss sees the" in said
    for ours, theirs in run_ranks(2, _through_the_runner, str(tmp_path)):
        assert ours[2] == 'DisCoDistributedDataParallel'
        assert_same_step(ours[1], state)
        assert [step for step, _ in ours[0]] == [step for step, _ in seen]
        assert [loss for _, loss in ours[0]] == pytest.approx([loss for _, loss in seen], rel=1e-9)
        assert theirs[2] == 'MMDistributedDataParallel'
        with pytest.raises(AssertionError, match='tensors differ'):
            assert_same_step(theirs[1], state)
    contrasts = 'loss (NTXentLoss) of SimCLR contrasts the samples of all 2 rank(s)'
    remedy = (
        " loss: each of the 2 ranks contrasts only its own samples.*model_wrapper_cfg.type='Dis"
    )
    ours, theirs = log_of(tmp_path / 'ours'), log_of(tmp_path / 'theirs')
    assert contrasts in ours and contrasts not in theirs
    assert re.search(remedy, theirs) and not re.search(remedy, ours)


def test_one_process_refuses_what_ranks_would(tmp_path):
    with pytest.raises(ValueError, match='Classifier has no contrastive loss'):
        run(tmp_path, 1, build(Classifier))


# ------------------------------------------------------------------ by itself


def _by_itself(rank, world_size):
    model = build(SimCLR)
    wrapped = DisCoDistributedDataParallel(model)
    assert copy.deepcopy(model).loss.process_group is model.loss.process_group
    batch_norm = nn.SyncBatchNorm(3)
    with pytest.raises(ValueError, match='Sequential has no contrastive loss'):
        DisCoDistributedDataParallel(nn.Sequential(nn.Linear(3, 3), batch_norm))
    assert batch_norm.process_group is None
    optim = AccumulationOptimWrapper(torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=2)
    with pytest.raises(ValueError, match='GradCacheOptimWrapper'):
        run_step(wrapped, data_of(SimCLR, 0, rows_of(rank, EVEN[2])), optim)
    return wrapped.broadcast_buffers


@pytest.mark.edge('disco', 'refused', 'A model without a loss that could see all ranks')
def test_what_it_leaves_alone_and_refuses():
    assert run_ranks(2, _by_itself) == [False, False]
