"""Descriptions of techniques: settings that check themselves, values of keys, order, refusals."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from mmengine.config import Config, DictAction

from memengine.engine.config.check import check_config
from memengine.engine.config.file import merge_options
from memengine.engine.config.schema.types import find_anywhere
from memengine.engine.hooks import DropITHook
from memengine.engine.techniques_of_config import is_on, refusals, wrong_settings
from memengine.technique import (
    Handle,
    Settings,
    Technique,
    in_order,
    register,
    setting,
    settings_of,
    techniques,
)
from tests.composition import BATCH, example_of, row_of, train
from tests.docs_pages import ROOT

ALL = techniques()
APPLIED = {key: technique for key, technique in ALL.items() if technique.apply}


@dataclass(frozen=True)
class ToySettings(Settings):
    share: float | Mapping[str, float] = setting(0.5, help='how much', low=0, below=1)
    modules: str | Sequence[str] | None = setting(None, help='where')
    kind: Literal['one', 'two'] = setting('one', help='which')
    pairs: Sequence[tuple[int, float]] = setting((), help='when')
    strict: bool = setting(True, help='whether nothing to do is an error')


def toy(key='toy', **fields):
    settings = dict(use_when='', saves='', price='', apply=lambda model, settings: Handle())
    return Technique(**{**settings, 'key': key, 'title': key, 'settings': ToySettings, **fields})


@pytest.mark.parametrize(
    ('value', 'expected'),
    [
        (None, None),
        (False, None),
        ([], None),
        (True, ToySettings()),
        (0.25, ToySettings(0.25)),
        (0, ToySettings(0)),
        (['a', 'b'], ToySettings(modules=['a', 'b'])),
        ('a', ToySettings(modules='a')),
        ("['a', b]", ToySettings(modules=['a', 'b'])),
        ({}, ToySettings()),
        ({'share': {'*': 0.5}, 'pairs': [[0, 0.5]]}, ToySettings({'*': 0.5}, pairs=[[0, 0.5]])),
        (ToySettings(0.1), ToySettings(0.1)),
    ],
)
def test_values_of_a_key(value, expected):
    assert toy(shorthand='share').read(value) == expected


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        (
            1.0,
            r'^toy: share is a number or a dict of \(a number\), at least 0 and below 1, got 1.0',
        ),
        ({'share': {'*': -1}}, 'toy: share is a number or a dict'),
        ({'share': True}, 'toy: share is a number or a dict .* got True'),
        ({'kind': 'three'}, "toy: kind is 'one' or 'two', got 'three'"),
        ({'shar': 1}, "^toy.shar: there is no such setting: did you mean 'share'"),
        ({'xyz': 1}, r'toy.xyz: there is no such setting \(it takes share, modules, kind, '),
        ({'modules': [1]}, r'toy: modules is text, a list of \(text\) or None, got \[1\]'),
        ({'pairs': [(1, 2, 3)]}, 'toy: pairs is a list of'),
        ({'strict': 1}, 'toy: strict is True or False, got 1'),
        (
            2j,
            r'^toy: got 2j, which .* True; a number .* for share; text, .* for modules; a dict',
        ),
    ],
)
def test_values_that_are_refused(value, said):
    with pytest.raises(ValueError, match=said):
        toy(shorthand='share').read(value)


def test_all_unknown_settings_are_told_at_once():
    with pytest.raises(ValueError, match='toy.a: .*\ntoy.b: '):
        toy().read({'a': 1, 'b': 2})


def test_a_number_is_refused_where_no_setting_takes_it():
    with pytest.raises(
        ValueError, match=r'toy: got 0.5, which is none of: True; text, .* for modules'
    ):
        toy().read(0.5)


def test_the_order():
    expected = [
        'sync_bn',
        'efficient_conv_bn_eval',
        'recomputed_activations',
        'dropit',
        'quantized_activations',
        'activation_checkpointing',
        'activation_offload',
        'compile_blocks',
    ]
    assert [one.key for one in in_order(ALL.values()) if one.key in expected] == expected
    between = toy(after=('dropit',), before=('quantized_activations',))
    keys = [technique.key for technique in in_order([between, *ALL.values()])]
    assert keys.index('toy') == keys.index('dropit') + 1
    assert keys.index('toy') == keys.index('quantized_activations') - 1
    early = toy(stage='before_wrap', after=('sync_bn',))
    assert [technique.key for technique in in_order([early, *ALL.values()])][1] == 'toy'
    with pytest.raises(ValueError, match='wait for each other: .*toy'):
        list(in_order([toy(after=('b',)), toy('b', after=('toy',))]))


@pytest.mark.parametrize('key', ALL)
def test_names_in_a_description_exist(key):
    technique = ALL[key]
    assert {*technique.after, *technique.before} <= APPLIED.keys()
    page = (technique.page or f'{key}.md').partition('#')[0]
    assert (ROOT / 'docs/techniques' / page).is_file(), (
        f'{key} needs its page: docs/techniques/{page}'
    )
    config = Config(dict(launcher='pytorch'))
    words = [word.split('=') for word in technique.typed.split()]
    merge_options(config, {path: DictAction._parse_iterable(text) for path, text in words})
    stated = {name: technique.read(config[name]) for name in config if name == key}
    assert is_on(technique, {**config, **stated}), f'{technique.typed} does not switch {key} on'
    for one in settings_of(technique.settings).values():
        assert one.field.metadata['help'] and one.wanted
    assert technique.shorthand is None or technique.shorthand in settings_of(technique.settings)


@pytest.mark.parametrize('key', sorted(ALL.keys() - APPLIED.keys()))
def test_settings_of_wrappers_and_optimisers_are_their_arguments(key):
    technique = ALL[key]
    place, _, kind = technique.name.partition('=')
    if not kind:
        kind = {'optim_wrapper': 'OptimWrapper', 'model': 'NTXentLoss'}[place.partition('.')[0]]
    found = inspect.signature(find_anywhere(kind, 'memengine')[1]).parameters
    for name, one in settings_of(technique.settings).items():
        default = inspect.Parameter.empty if one.is_required else one.field.default
        assert found[name].default == default, f'{kind}.{name}'


def base_configs():
    for path in sorted((ROOT / 'configs/_base_/techniques').glob('*.py')):
        yield path.stem, Config.fromfile(path)


@pytest.mark.parametrize('key', APPLIED)
def test_the_base_config_of_each_is_checked_and_trains(key):
    technique = APPLIED[key]
    configs = [config for _, config in base_configs() if config.get(key) is not None]
    assert len(configs) == 1, f'{key} needs one base config: configs/_base_/techniques/{key}.py'
    config = configs[0]
    backbone = {'type': 'TimmBackbone', 'model_name': 'resnet18'}
    parts = {'backbone': backbone, 'head': {'type': 'ProjectionHead'}}
    check_config({'model': {'type': 'SimCLR', **parts}, **config})
    if technique.needs_ranks:
        return
    settings = technique.read(config[key])
    assert technique.example is not None, f'{key} needs an example: small settings to try it with'
    known = settings_of(technique.settings)
    small = {n: v for n, v in vars(technique.example).items() if v != known[n].field.default}
    row = replace(row_of(technique), cfg={key: vars(replace(settings, **small))})
    trained = train(row.models[0], [row], iterations=1)
    assert trained.isfinite().all()


@pytest.mark.parametrize('key', [key for key, one in ALL.items() if one.example is not None])
def test_examples_are_small(key):
    sizes = str(example_of(ALL[key]))
    assert 'size=16' not in sizes and BATCH == 8


def test_a_key_is_for_one_technique(monkeypatch):
    monkeypatch.setattr('memengine.technique.description._known', dict(techniques()))
    mine = register(toy())
    assert register(mine) is techniques()['toy']
    with pytest.raises(ValueError, match="two techniques have the key 'toy': .*ToySettings"):
        register(toy())
    with pytest.raises(ValueError, match='technique other: needs apply, or switch'):
        toy('other', apply=None)


IN_BACKWARD: dict[str, Any] = dict(type='OptimizerInBackwardOptimWrapper')
SHARDED = dict(launcher='pytorch', model_wrapper_cfg=dict(type='MMFullyShardedDataParallel'))


@pytest.mark.parametrize(
    ('config', 'said'),
    [
        (dict(dropit=0.5, compile=True), 'compile and dropit .* set one of them'),
        (
            dict(custom_hooks=[dict(type='memengine.DropITHook', priority=3)], compile_blocks=True),
            'compile_blocks and dropit',
        ),
        (
            dict(compile_blocks=dict(backend='eager'), activation_checkpointing=True),
            "activation_checkpointing and compile_blocks.backend=eager .*use backend='aot_eager'",
        ),
        (
            dict(compile_blocks=True, activation_checkpointing=dict(budget=0.5)),
            'activation_checkpointing.budget and compile_blocks .* use keep',
        ),
        (
            dict(optim_wrapper=dict(clip_grad=dict(max_norm=1), **IN_BACKWARD)),
            "optim_wrapper.clip_grad.type=norm and .*InBackward.* set clip_grad.type='each_norm'",
        ),
        (
            dict(optim_wrapper=dict(accumulative_counts=2, **IN_BACKWARD)),
            "optim_wrapper.accumulative_counts and .*InBackward.* use .*type='OptimWrapper'",
        ),
        (
            dict(
                launcher='pytorch',
                model_wrapper_cfg=dict(type='MMDistributedDataParallel'),
                optim_wrapper=IN_BACKWARD,
            ),
            'MMDistributedDataParallel and .*InBackward.* shard the model',
        ),
        (dict(compile=True, **SHARDED), 'compile and .*FullySharded.* .compile_blocks=True'),
        (dict(sync_bn='mmcv', **SHARDED), 'FullySharded.* and sync_bn.kind=mmcv'),
        (dict(custom_hooks=[dict(type='EMAHook')], **SHARDED), 'EMAHook copies the model'),
        *(
            (
                dict(optim_wrapper=dict(optimizer=dict(type=name)), **SHARDED),
                f'FullySharded.* and .*{name} .* no checkpoint of shards in few bits',
            )
            for name in ('AdamW8bit', 'AdamW4bit')
        ),
    ],
)
def test_pairs_that_are_refused(config, said):
    (problem,) = refusals(config)
    assert re.search(said, problem), problem


@pytest.mark.parametrize(
    'config',
    [
        dict(dropit=True, quantized_activations=4, activation_offload=True),
        dict(compile_blocks=dict(backend='eager'), activation_checkpointing=None),
        dict(compile_blocks=True, activation_checkpointing=dict(keep='matmuls')),
        dict(
            optim_wrapper=dict(
                clip_grad=dict(type='value', clip_value=1),
                accumulative_counts=1,
                precision='bf16',
                **IN_BACKWARD,
            )
        ),
        dict(optim_wrapper=dict(clip_grad=None, **IN_BACKWARD)),
        dict(launcher='none', model_wrapper_cfg=SHARDED['model_wrapper_cfg'], compile=True),
    ],
)
def test_pairs_that_are_not(config):
    assert refusals(config) == []


@pytest.mark.parametrize(
    ('config', 'said'),
    [
        (
            dict(optim_wrapper=dict(type='GradCacheOptimWrapper', chunk_size=0, keep_graph='all')),
            [
                'optim_wrapper.chunk_size is a number, a dict of (a number) or '
                "'auto', at least 1, got 0",
                "optim_wrapper.keep_graph is a whole number or 'auto', at least 0, got 'all'",
            ],
        ),
        (dict(optim_wrapper=dict(type='OptimWrapper', chunk_size=0, accumulative_counts=1)), []),
        (
            dict(optim_wrapper=dict(optimizer=dict(type='AdamW8bit', block_size=0))),
            ['optim_wrapper.optimizer.block_size is a whole number, at least 1, got 0'],
        ),
        (
            dict(model=dict(loss=dict(type='ClipLoss', tile_size=-1))),
            ["model.loss.tile_size is a whole number, 'auto' or None, at least 1, got -1"],
        ),
        (dict(model=dict(loss='ClipLoss'), optim_wrapper=dict(precision='bf16')), []),
    ],
)
def test_settings_of_what_is_no_key_are_checked_by_their_description(config, said):
    assert wrong_settings(config) == said


def test_a_key_whose_hook_is_left_out_is_refused_nothing():
    config = dict(dropit=True, compile=True)
    assert refusals(config) and refusals(config, [DropITHook()])
    assert refusals(config, []) == []
