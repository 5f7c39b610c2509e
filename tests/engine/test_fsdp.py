"""Ranks that hold a part of the model each take the steps of one process that holds all of it."""

import os
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper, OptimWrapper
from memengine.engine.step import run_step, unwrap
from memengine.engine.wrappers import (
    FullyShardedDataParallel,
    MMDistributedDataParallel,
    MMFullyShardedDataParallel,
)
from memengine.models import CLIP, Classifier, SimCLR
from memengine.registry import FUNCTIONS
from memengine.testing import assert_same_step, relative_error, run_ranks
from tests.engine.test_sliced import big_batch, model_and_batch, share
from tests.engine.toy import Losses, toy_runner
from tests.marks import NEEDS_SHARDING
from tests.models.test_dino import config as dino_config
from tests.models.toy import build

pytestmark = NEEDS_SHARDING

STEPS = 12
KINDS = {
    Classifier: dict(optim=AccumulationOptimWrapper, micro_batch_size=1),
    'DINO': dict(optim=AccumulationOptimWrapper, micro_batch_size=1),
    CLIP: dict(optim=GradCacheOptimWrapper, chunk_size=1),
}


def optimizer_of(model, optim=OptimWrapper, clip='norm', **settings):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    optimizer.register_step_pre_hook(lambda *_: model.before_update())
    optimizer.register_step_post_hook(lambda *_: model.after_update())
    return optim(optimizer, clip_grad=dict(type=clip, max_norm=0.5), **settings)


def train_plainly(kind, steps=STEPS, **settings):
    """Losses of each step, and the state after all of them, of one process with everything."""
    model, _ = model_and_batch(kind)
    wrapper = optimizer_of(model, **settings)
    losses = [run_step(model, big_batch(kind, seed), wrapper)['loss'] for seed in range(steps)]
    return torch.stack(losses).detach(), {k: v.detach() for k, v in model.state_dict().items()}


def train_sharded(kind, rank, world_size, steps=STEPS, wrapping=None, **settings):
    """The same of a rank, with the whole tensors of its shards."""
    model, _ = model_and_batch(kind)
    wrapped = FullyShardedDataParallel(model, **(wrapping or {}))
    wrapper = optimizer_of(model, **settings)
    losses = [
        wrapped.train_step(share(big_batch(kind, seed), rank, world_size), wrapper)['loss']
        for seed in range(steps)
    ]
    return torch.stack(losses).detach(), whole(wrapped.state_dict())


def whole(state):
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def _follow(rank, world_size, steps):
    return {
        (kind, offload): train_sharded(
            kind, rank, world_size, steps, wrapping=dict(offload=offload), **settings
        )
        for kind, settings in KINDS.items()
        for offload in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize(('world_size', 'steps'), [(2, STEPS), (4, 4)])
def test_ranks_follow_one_process_for_many_steps(world_size, steps):
    ranks = run_ranks(world_size, _follow, steps)
    for kind in KINDS:
        losses, state = train_plainly(kind, steps)
        for offload in (False, True):
            results = [rank[kind, offload] for rank in ranks]
            mean = torch.stack([result[0] for result in results]).mean(0)
            assert relative_error(mean, losses) < 1e-9
            for result in results:
                assert_close(result[1], state)


def assert_close(actual, expected):
    for name, tensor in expected.items():
        # timm resamples position embeddings of local crops in fp32
        tolerance = 1e-7 if name.endswith('pos_embed') else 1e-9
        assert_same_step({name: actual[name]}, {name: tensor}, tolerance)


# ------------------------------------------------------------------ other ways to train


OTHERS = {  # algorithm, how the model is wrapped, how the step is carried out
    'whole batch': (Classifier, {}, dict(clip='each_norm')),
    'kept for the step': (
        SimCLR,
        dict(free_after='step'),
        dict(optim=GradCacheOptimWrapper, chunk_size=3),
    ),
    'graphs kept': (
        CLIP,
        dict(free_after='backward'),
        dict(optim=GradCacheOptimWrapper, chunk_size=3, keep_graph=2),
    ),
    'reduced by each slice': (
        'DINO',
        dict(reduce_once=False),
        dict(optim=AccumulationOptimWrapper, micro_batch_size=2),
    ),
    'over iterations': (CLIP, {}, dict(accumulative_counts=2, accumulate_coupled=True)),
    'head by itself': (
        'DINO',
        dict(units=['blocks', '*.last_layer']),
        dict(optim=AccumulationOptimWrapper, micro_batch_size=2),
    ),
}


def _others(rank, world_size):
    return {
        name: train_sharded(kind, rank, world_size, steps=4, wrapping=wrapping, **settings)[1]
        for name, (kind, wrapping, settings) in OTHERS.items()
    }


@pytest.mark.slow
def test_other_ways_follow_one_process_too():
    ranks = run_ranks(2, _others)
    for name, (kind, _, settings) in OTHERS.items():
        _, state = train_plainly(kind, steps=4, **settings)
        for results in ranks:
            assert_close(results[name], state)


def _frozen_and_half(rank, world_size):
    frozen = FullyShardedDataParallel(build(CLIP, embed_dim=None, frozen=['image']))
    data = share(big_batch(CLIP, 0), rank, world_size)
    before = whole(frozen.state_dict())
    wrapper = optimizer_of(frozen.module, GradCacheOptimWrapper, chunk_size=2)
    frozen.train_step(data, wrapper)
    after = whole(frozen.state_dict())
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and not any('image' in name for name in changed)

    data = share(big_batch(Classifier, 0), rank, world_size)
    data['inputs'] = data['inputs'].float()
    for dtypes, precision, seen in (
        (dict(param_dtype='bfloat16', reduce_dtype='float32'), 'fp32', torch.bfloat16),
        (dict(), 'fp16', torch.float16),
    ):
        half = FullyShardedDataParallel(build(Classifier).float(), **dtypes)
        outputs = []
        half.module.head.register_forward_hook(lambda *args, o=outputs: o.append(args[2].dtype))
        wrapper = optimizer_of(half.module, precision=precision, loss_scale=128.0)
        before = whole(half.state_dict())
        half.train_step(data, wrapper)
        after = whole(half.state_dict())
        assert outputs == [seen]
        for name, tensor in after.items():
            assert tensor.dtype == torch.float32 and torch.isfinite(tensor).all()
            assert not torch.equal(tensor, before[name]), name


def test_frozen_towers_stay_and_half_precision_is_gathered():
    run_ranks(2, _frozen_and_half)


def _overflows_on_one_rank(rank, world_size):
    """Steps of a CLIP, whose first parameter is a scalar that all ranks hold, in fp16."""
    wrapped = FullyShardedDataParallel(build(CLIP).float())
    wrapper = optimizer_of(wrapped.module, precision='fp16', loss_scale=dict(init_scale=128.0))
    scales, have_changed = [], []
    for seed in range(3):
        data = share(big_batch(CLIP, seed), rank, world_size)
        data['inputs'] = data['inputs'].float()
        shard = next(p for p in wrapped.parameters() if isinstance(p, DTensor))
        is_spoilt = seed == 1 and rank == 1
        wrapper.on_gradient = lambda p=shard, s=is_spoilt: s and p.grad.to_local().fill_(torch.inf)
        before = whole(wrapped.state_dict())
        wrapped.train_step(data, wrapper)
        after = whole(wrapped.state_dict())
        scales.append(wrapper.precision.scaler.get_scale())
        have_changed.append([not torch.equal(after[name], before[name]) for name in after])
        assert all(tensor.isfinite().all() for tensor in after.values())
    return scales, [all(have_changed[0]), any(have_changed[1]), all(have_changed[2])]


def test_an_overflow_on_one_rank_is_one_on_all_beside_a_scalar():
    for scales, have_changed in run_ranks(2, _overflows_on_one_rank):
        assert scales == [128.0, 64.0, 64.0]
        assert have_changed == [True, False, True]


def _thawed(rank, world_size):
    """Steps of a CLIP whose scale and a tower are trained from the second on only."""
    model = build(CLIP)
    late = [model.logit_scale, *model.towers['text'].parameters()]
    for parameter in late:
        parameter.requires_grad_(False)
    wrapped = FullyShardedDataParallel(model) if world_size > 1 else model
    late = [p for p in wrapped.parameters() if not p.requires_grad]
    wrapper = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for seed in range(3):
        for parameter in late if seed else ():
            parameter.requires_grad_(True)
        wrapped.train_step(share(big_batch(CLIP, seed), rank, world_size), wrapper)
    return whole(model.state_dict())


def test_what_is_trained_later_is_reduced_then():
    for result in run_ranks(2, _thawed):
        assert_close(result, _thawed(0, 1))


def _thawed_under_ddp(rank, world_size):
    model = build(CLIP)
    model.logit_scale.requires_grad_(False)
    wrapped = MMDistributedDataParallel(model)
    wrapper = optimizer_of(model)
    data = share(big_batch(CLIP, 0), rank, world_size)
    wrapped.train_step(data, wrapper)
    model.logit_scale.requires_grad_(True)
    with pytest.raises(ValueError, match=r'logit_scale \(1 parameters in all\) was frozen when'):
        wrapped.train_step(data, wrapper)


@pytest.mark.edge(
    'data_parallel',
    'refused',
    'A parameter that was frozen when the model was wrapped, and is trained',
)
def test_what_is_trained_later_is_refused_under_ddp():
    run_ranks(2, _thawed_under_ddp)


# ------------------------------------------------------------------ through the Runner


class Images(torch.utils.data.Dataset):
    metainfo = {}

    def __len__(self):
        return 16

    def __getitem__(self, index):
        image = torch.full((1, 8, 8), index / 16, dtype=torch.float64)
        image = image + torch.randn(1, 8, 8, dtype=torch.float64)
        return dict(inputs=image, data_samples=dict(label=index % 3, index=index))


def runner_of(work_dir, world_size, wrapper, **options):
    losses = Losses()
    loader = dict(
        dataset=Images(),
        batch_size=8 // world_size,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate'),
    )
    settings = dict(
        loader=dict(dataset=Images(), batch_size=8 // world_size),
        launcher='pytorch' if world_size > 1 else 'none',
        custom_hooks=[losses, dict(type='ReportHook', num_images=2)],
        default_hooks=dict(memory=dict(type='MemoryHook')),
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=[dict(type='AccuracyMetric')],
        optim_wrapper=dict(
            optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.1),
            paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys={'head': dict(lr_mult=2.0)}),
            clip_grad=dict(max_norm=0.5),
        ),
        log_level='INFO',
        model=build(Classifier),
        cfg=dict(model_wrapper_cfg=wrapper),
    )
    return toy_runner(work_dir, **{**settings, **options}), losses


def result_of(runner, losses):
    groups = runner.optim_wrapper.optimizer.param_groups
    settings = sorted((g['lr'], g['weight_decay'], len(g['params'])) for g in groups)
    accuracy = runner.message_hub.get_scalar('val/top1').current()
    saved_mib = runner.message_hub.get_scalar('train/saved_mib').current()
    state = whole(unwrap(runner.model).state_dict())
    return losses.seen, state, settings, accuracy, saved_mib


@FUNCTIONS.register_module()
def fill_with_ones(module):
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        torch.nn.init.ones_(tensor)


def check_meta(world_size, work_dir):
    """The Runner builds a model without values, and gives it some."""
    wrapper = dict(type='FullyShardedDataParallel', meta=True, init_fn='fill_with_ones')
    model = dict(type='DINO', **dino_config())
    state = whole(
        unwrap(runner_of(work_dir, world_size, wrapper, model=model)[0].model).state_dict()
    )
    for name, tensor in state.items():
        if name.startswith('student'):
            assert torch.equal(tensor, torch.ones_like(tensor))
            assert torch.equal(tensor, state[name.replace('student', 'teacher', 1)])
    del wrapper['init_fn']  # timm's and our own modules need none
    model['data_preprocessor'] = dict(type='ImgDataPreprocessor', mean=[3.0], std=[2.0])
    runner, _ = runner_of(f'{work_dir}/own', world_size, wrapper, model=model)
    state = whole(unwrap(runner.model).state_dict())
    assert unwrap(runner.model).data_preprocessor.mean.tolist() == [[[3.0]]]
    for name, tensor in state.items():
        if name.startswith('student'):
            assert torch.equal(tensor, state[name.replace('student', 'teacher', 1)]), name
        if name.endswith('weight_g'):
            assert torch.equal(tensor, torch.ones_like(tensor))
        if name.endswith(('fc1.weight', 'mlp.0.weight')):
            assert 0.01 < tensor.std() < 0.03, name


def _through_the_runner(rank, world_size, work_dir):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    check_meta(world_size, f'{work_dir}/meta')
    wrapper = dict(type='MMFullyShardedDataParallel', cpu_offload=True)
    runner, losses = runner_of(f'{work_dir}/two', world_size, wrapper)
    runner.train()
    refused = {
        'EMAHook copies the model': dict(custom_hooks=[dict(type='EMAHook')]),
        'compile_blocks=True': dict(cfg=dict(model_wrapper_cfg=wrapper, compile=True)),
    }
    for number, (message, options) in enumerate(refused.items()):
        with pytest.raises(ValueError, match=message):
            runner_of(f'{work_dir}/refused{number}', world_size, wrapper, **options)[0].train()
    return result_of(runner, losses)


def test_a_run_on_two_ranks_is_the_run_on_one(tmp_path):
    runner, losses = runner_of(tmp_path / 'one', 1, None)
    runner.train()
    seen, state, groups, accuracy, saved_mib = result_of(runner, losses)
    for actual in run_ranks(2, _through_the_runner, str(tmp_path)):
        assert [place for place, _ in actual[0]] == [place for place, _ in seen]
        assert_close(actual[1], state)
        assert actual[2] == groups and len(groups) == 3
        assert actual[3] == accuracy
        # of half of the batch; weights that are gathered are none of it
        assert actual[4] == pytest.approx(saved_mib / 2, rel=0.02)
    assert (tmp_path / 'two' / 'report' / 'attention.png').is_file()


def test_one_process_refuses_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match='several processes.*torchrun.*nproc_per_node 1'):
        runner_of(tmp_path, 1, dict(type='MMFullyShardedDataParallel', cpu_offload=True))
    with pytest.raises(ValueError, match='needs a process group.*torchrun'):
        FullyShardedDataParallel(build(Classifier))


# ------------------------------------------------------------------ what MMEngine's configs say


def _of_mmengine(rank, world_size):
    def units(**settings):
        wrapped = MMFullyShardedDataParallel(build(Classifier), **settings)
        return wrapped, wrapped._sharded.units

    blocks = tuple(f'backbone.model.blocks.{number}' for number in range(2))
    accepted = [
        dict(),
        dict(sharding_strategy='SHARD_GRAD_OP', use_orig_params=True, sync_module_states=True),
        dict(limit_all_gathers=True, forward_prefetch=False, prefetch=True),
        dict(sharding_strategy=ShardingStrategy.FULL_SHARD, cpu_offload=CPUOffload(True)),
        dict(mixed_precision=dict(param_dtype='bfloat16')),
    ]
    parts = tuple(f'{block}.{part}' for block in blocks for part in ('attn', 'mlp'))
    for settings in accepted:
        assert units(**settings)[1] == (parts if 'cpu_offload' in settings else blocks)
    by_size = dict(type='size_based_auto_wrap_policy', min_num_params=500)
    FUNCTIONS.register_module(module=size_based_auto_wrap_policy)
    assert (
        units(auto_wrap_policy=by_size)[1]
        == units(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=500))[1]
    )
    assert units(auto_wrap_policy=by_size)[1] not in (blocks, ())
    refused = {
        "got 'NO_SHARD'; .*type='MMDistributedDataParallel'": dict(sharding_strategy='NO_SHARD'),
        "got 'HYBRID_SHARD'; .*set replicas": dict(sharding_strategy='HYBRID_SHARD'),
        'use_orig_params=False was for FSDP1; leave it out': dict(use_orig_params=False),
        "backward_prefetch='BACKWARD_POST' .*; set prefetch": dict(
            backward_prefetch='BACKWARD_POST'
        ),
        'param_init_fn=.*; set init_fn': dict(param_init_fn='fill_with_ones'),
        'ignored_modules=': dict(ignored_modules=['head']),
        r'process_group=\(1, 2\) .*; set replicas': dict(process_group=(1, 2)),
        'mixed_precision must be dict.* got': dict(mixed_precision=dict(buffer_dtype='float16')),
        "auto_wrap_policy: there is no function 'none'": dict(auto_wrap_policy='none'),
        "param_dtype must be a type of torch .* got 'half precision'": dict(
            mixed_precision=dict(param_dtype='half precision')
        ),
    }
    for message, settings in refused.items():
        with pytest.raises(ValueError, match=message):
            units(**settings)


@pytest.mark.slow
def test_arguments_of_mmengine_are_translated_or_refused_by_name():
    run_ranks(2, _of_mmengine)
