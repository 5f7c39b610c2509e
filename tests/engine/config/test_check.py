"""The config checker: what it refuses and how it says so, and that it lets everything else pass."""

import copy
import inspect
import re
from pathlib import Path

import mmengine.runner.runner
import pytest
from mmengine.config import Config

import memengine
from memengine.engine.config.check import (
    ConfigError,
    check_config,
    import_custom_modules,
    known_keys,
)
from memengine.engine.config.file import load_config
from memengine.engine.config.schema.types import arguments_of, find_anywhere
from tests.engine.config_shapes import VALID, base, loader

CONFIGS = sorted(
    path for path in Path(__file__).parents[3].glob('configs/**/*.py') if '_base_' not in path.parts
)


def problems(config):
    """What the checker says, a list of sentences."""
    with pytest.raises(ConfigError) as error:
        check_config(Config(copy.deepcopy(config)))
    return error.value.problems


def edited(path, value, config=None):
    """A config with one entry set; ``...`` removes it."""
    config = copy.deepcopy(base() if config is None else config)
    *keys, last = path.split('.')
    node = config
    for key in keys:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return config


# -- what passes -------------------------------------------------------------------------------


@pytest.mark.parametrize('name', VALID)
def test_valid_shapes_pass(name):
    check_config(Config(copy.deepcopy(VALID[name])))
    check_config(copy.deepcopy(VALID[name]))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_our_configs_pass(path):
    check_config(Config.fromfile(path))


def test_there_are_configs_to_check():
    assert CONFIGS


def test_the_config_is_left_as_it_was():
    config = Config(base())
    before = copy.deepcopy(config.to_dict())
    check_config(config)
    assert config.to_dict() == before


# -- what is refused, word for word --------------------------------------------------------------

REFUSED = [
    (
        'default_hooks.logger.interval',
        0,
        'default_hooks.logger.interval: must be a positive integer, got 0',
    ),
    (
        'default_hooks.logger.interval',
        'x',
        "default_hooks.logger.interval: must be a whole number, got 'x'",
    ),
    (
        'train_dataloader.pin_memory',
        'no',
        "train_dataloader.pin_memory: must be True or False, got 'no'",
    ),
    (
        'param_scheduler',
        dict(type='ConstantLR', begin=-3),
        'param_scheduler.begin: must be an integer of 0 or more, got -3',
    ),
    (
        'model.backbone',
        dict(type='TimmBackbone', model_name='vit_tiny_patch16_224', img_size=16, patch_size=5),
        'model.backbone.patch_size: must divide img_size=16, got 5',
    ),
    (
        'model.backbone',
        dict(type='TimmBackbone', model_name='vit_tiny_patch16_224', img_siz=16),
        "model.backbone.img_siz: TimmBackbone takes no argument 'img_siz': "
        "did you mean 'img_size'?",
    ),
    ('optim_wraper', dict(), "unknown key 'optim_wraper': did you mean 'optim_wrapper'?"),
    ('spam', 1, "unknown key 'spam'; a key of your own goes below vars=dict(...)"),
    ('vars', 3, 'vars: must be a dict of keys of your own, got 3'),
    (
        'optim_wrapper.optimizer.lrr',
        1,
        "optim_wrapper.optimizer.lrr: SGD takes no argument 'lrr': did you mean 'lr'?",
    ),
    (
        'optim_wrapper.lr',
        1,
        "optim_wrapper.lr: OptimWrapper takes no argument 'lr': "
        "did you mean 'optim_wrapper.optimizer.lr'?",
    ),
    (
        'optim_wrapper.optimizer.type',
        'AdmW',
        "optim_wrapper.optimizer.type: there is no optimizer 'AdmW': did you mean 'AdamW'?",
    ),
    (
        'model.type',
        'ShapeModl',
        "model.type: there is no model 'ShapeModl': did you mean 'ShapeModel'?",
    ),
    (
        'model.backbone.type',
        'ShapeBackbon',
        "model.backbone.type: there is no model 'ShapeBackbon': did you mean 'ShapeBackbone'?",
    ),
    (
        'model.backbone.init_cf',
        None,
        "model.backbone.init_cf: ShapeBackbone takes no argument 'init_cf': "
        "did you mean 'init_cfg'?",
    ),
    (
        'model.backbone.init_cfg',
        dict(type='Kaimin'),
        "model.backbone.init_cfg.type: there is no weight initializer 'Kaimin': "
        "did you mean 'Kaiming'?",
    ),
    (
        'model.backbone.norm_cfg',
        dict(type='torch.nn.BatchNorm2d', requires_grad=True, momentm=1),
        "model.backbone.norm_cfg.momentm: BatchNorm2d takes no argument 'momentm': "
        "did you mean 'momentum'?",
    ),
    (
        'model.head.loss.loss_wieght',
        1,
        "model.head.loss.loss_wieght: ShapeLoss takes no argument 'loss_wieght': "
        "did you mean 'loss_weight'?",
    ),
    (
        'train_dataloader.batch_size',
        0,
        'train_dataloader.batch_size: must be a positive integer, got 0',
    ),
    (
        'train_dataloader.batch_size',
        True,
        'train_dataloader.batch_size: must be a positive integer, got True',
    ),
    (
        'train_dataloader.num_workers',
        -1,
        'train_dataloader.num_workers: must be an integer of 0 or more, got -1',
    ),
    (
        'train_dataloader.persistent_workers',
        True,
        'train_dataloader.persistent_workers: needs num_workers above 0; '
        'set persistent_workers=False or num_workers=1',
    ),
    (
        'train_dataloader.timeout',
        60,
        'train_dataloader.timeout: needs num_workers above 0; set timeout=0 or num_workers=1',
    ),
    (
        'train_dataloader.shuffle',
        True,
        'train_dataloader.shuffle: the sampler decides about the order; '
        "write sampler=dict(type='DefaultSampler', shuffle=True) instead",
    ),
    ('train_dataloader.sampler', ..., 'train_dataloader.sampler: is missing'),
    (
        'train_dataloader.dataset.pipline',
        [],
        "train_dataloader.dataset.pipline: ShapeData takes no argument 'pipline': "
        "did you mean 'pipeline'?",
    ),
    (
        'train_dataloader.dataset.pipeline.0.type',
        'ShapeResise',
        "train_dataloader.dataset.pipeline.0.type: there is no transform 'ShapeResise': "
        "did you mean 'ShapeResize'?",
    ),
    (
        'train_dataloader.dataset.pipeline.0.keep_ration',
        True,
        'train_dataloader.dataset.pipeline.0.keep_ration: ShapeResize takes no argument '
        "'keep_ration': did you mean 'keep_ratio'?",
    ),
    (
        'train_dataloader.collate_fn.type',
        'memengine_only_collate',
        "train_dataloader.collate_fn.type: there is no function 'memengine_only_collate': "
        "it is of the scope 'memengine'; write type='memengine.memengine_only_collate'",
    ),
    ('train_cfg.max_epochs', 0, 'train_cfg.max_epochs: must be a positive integer, got 0'),
    (
        'train_cfg.max_iters',
        10,
        "train_cfg.max_iters: EpochBasedTrainLoop takes no argument 'max_iters'",
    ),
    ('train_cfg.max_epochs', ..., 'train_cfg.max_epochs: is missing; EpochBasedTrainLoop needs it'),
    (
        'train_cfg',
        dict(type='EpochBasedTrainLoop', by_epoch=True, max_epochs=1),
        "train_cfg.by_epoch: EpochBasedTrainLoop takes no argument 'by_epoch'",
    ),
    (
        'optim_wrapper.accumulative_counts',
        0,
        'optim_wrapper.accumulative_counts: must be a positive integer, got 0',
    ),
    (
        'optim_wrapper.optimizer.lr',
        '1e-3',
        "optim_wrapper.optimizer.lr: must be a positive number, got '1e-3' "
        '(text; write it without quotes, as 0.001)',
    ),
    (
        'optim_wrapper.optimizer.lr',
        0,
        'optim_wrapper.optimizer.lr: must be a positive number, got 0',
    ),
    (
        'optim_wrapper.clip_grad',
        dict(max_nrom=1),
        "optim_wrapper.clip_grad.max_nrom: there is no such setting: did you mean 'max_norm'?",
    ),
    (
        'optim_wrapper.paramwise_cfg',
        dict(bias_deacy_mult=0),
        'optim_wrapper.paramwise_cfg.bias_deacy_mult: there is no such setting: '
        "did you mean 'bias_decay_mult'?",
    ),
    (
        'optim_wrapper.paramwise_cfg',
        dict(custom_keys={'backbone': dict(lr_mul=0.1)}),
        'optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mul: there is no such setting: '
        "did you mean 'lr_mult'?",
    ),
    (
        'optim_wrapper.constructor',
        'ShapeConstrutor',
        "optim_wrapper.constructor: there is no optimizer wrapper constructor 'ShapeConstrutor': "
        "did you mean 'ShapeConstructor'?",
    ),
    (
        'param_scheduler.0.typ',
        'x',
        "param_scheduler.0.typ: MultiStepLR takes no argument 'typ'",
    ),
    (
        'param_scheduler',
        dict(typ='MultiStepLR', milestones=[1]),
        "param_scheduler.typ: did you mean 'type'?",
    ),
    (
        'val_evaluator.type',
        'ShapeMetrik',
        "val_evaluator.type: there is no metric 'ShapeMetrik': did you mean 'ShapeMetric'?",
    ),
    (
        'custom_hooks',
        [dict(typ='EMAHook')],
        "custom_hooks.0: needs a type, dict(type='...', ...): "
        "did you mean 'type' instead of 'typ'?",
    ),
    (
        'custom_hooks',
        [dict(type='SGD')],
        "custom_hooks.0.type: there is no hook 'SGD' (it is registered as optimizer)",
    ),
    (
        'custom_hooks',
        [dict(type='EMAHook', begin_itr=3)],
        "custom_hooks.0.begin_itr: EMAHook takes no argument 'begin_itr': "
        "did you mean 'begin_iter'?",
    ),
    ('custom_hooks', ['EMAHook'], "custom_hooks.0: must be a dict with a 'type', got 'EMAHook'"),
    ('custom_hooks', [dict(type=3)], 'custom_hooks.0.type: must be a name or a class, got 3'),
    (
        'custom_hooks',
        [dict(type='mmengin.EMAHook')],
        "custom_hooks.0.type: there is no hook 'mmengin.EMAHook' (there is no package 'mmengin'): "
        "did you mean 'EMAHook'?",
    ),
    (
        'default_hooks.checkpoint',
        dict(intervall=1),
        "default_hooks.checkpoint.intervall: CheckpointHook takes no argument 'intervall': "
        "did you mean 'interval'?",
    ),
    (
        'default_hooks.checkpoint',
        dict(typ='CheckpointHook', interval=1),
        "default_hooks.checkpoint.typ: did you mean 'type'?",
    ),
    (
        'default_hooks.checkpont',
        dict(type='CheckpointHook'),
        "default_hooks.checkpont: there is no such setting: did you mean 'checkpoint'?",
    ),
    (
        'env_cfg',
        dict(cudnn_bench=True),
        "env_cfg.cudnn_bench: there is no such setting: did you mean 'cudnn_benchmark'?",
    ),
    (
        'env_cfg',
        dict(mp_cfg=dict(start_method='fork')),
        "env_cfg.mp_cfg.start_method: there is no such setting: did you mean 'mp_start_method'?",
    ),
    ('randomness', dict(sed=1), "randomness.sed: there is no such setting: did you mean 'seed'?"),
    (
        'randomness',
        dict(seed='x'),
        "randomness.seed: must be an integer of 0 or more, or None, got 'x'",
    ),
    (
        'launcher',
        'pytroch',
        "launcher: must be one of 'none', 'pytorch', 'slurm', 'mpi', got 'pytroch': "
        "did you mean 'pytorch'?",
    ),
    (
        'verify_exactness',
        dict(evry=10),
        "verify_exactness.evry: there is no such setting: did you mean 'every'?",
    ),
    (
        'verify_exactness',
        dict(samples=0),
        'verify_exactness.samples: must be a positive integer or None, got 0',
    ),
    (
        'verify_exactness',
        1000,
        'verify_exactness: must be True, False or dict(every=..., samples=..., tolerance=...), got',
    ),
    (
        'compile',
        dict(bakend='eager'),
        "compile.bakend: there is no such setting: did you mean 'backend'?",
    ),
    (
        'model_wrapper_cfg',
        dict(find_unused=True),
        "model_wrapper_cfg.find_unused: MMDistributedDataParallel takes no argument 'find_unused': "
        "did you mean 'find_unused_parameters'?",
    ),
    (
        'auto_scale_lr',
        dict(enabled=True),
        "auto_scale_lr.enabled: there is no such setting: did you mean 'enable'?",
    ),
    (
        'visualizer',
        dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackends')]),
        "visualizer.vis_backends.0.type: there is no vis backend 'LocalVisBackends': "
        "did you mean 'LocalVisBackend'?",
    ),
    (
        'train_dataloader.dataset.pipeline',
        [dict(type='ShapeViews', views=[dict(nmu=2, pipeline=[])])],
        'train_dataloader.dataset.pipeline.0.views.0.nmu: there is no such setting: '
        "did you mean 'num'?",
    ),
    (
        'tta_pipeline',
        [dict(type='ShapePolicies', policies=[dict(type='ShapeResize', size=2, magnitude=1)])],
        "tta_pipeline.0.policies.0.magnitude: ShapeResize takes no argument 'magnitude' "
        '(it takes keep_ratio, size)',
    ),
    ('model._delete_', True, 'model._delete_: no base config sets model: remove this key'),
    ('model', ..., "model: is missing: model=dict(type='...', ...)"),
    ('model', 'DINO', "model: must be a dict with a 'type', got 'DINO'"),
    (
        'optim_wrapper',
        ...,
        'optim_wrapper: missing beside train_dataloader and train_cfg: '
        'the three go together, or none is there',
    ),
    (
        'val_evaluator',
        None,
        'val_evaluator: missing beside val_dataloader and val_cfg: '
        'the three go together, or none is there',
    ),
    (
        'dropit',
        dict(gama=0.5, modules=['backbone']),
        "dropit.gama: there is no such setting: did you mean 'gamma'?",
    ),
    (
        'runner_type',
        'Runer',
        "runner_type: there is no runner 'Runer': did you mean 'Runner'?",
    ),
]


@pytest.mark.parametrize(('path', 'value', 'said'), REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals(path, value, said):
    found = problems(edited(path, value))
    assert found[0].startswith(said), found
    assert len(found) == 1, found


def test_all_problems_are_told_at_once():
    config = edited('optim_wrapper.optimizer.lrr', 1)
    config = edited('train_dataloader.batch_size', 0, config)
    config = edited('spam', 1, config)
    with pytest.raises(ConfigError) as error:
        check_config(config)
    assert len(error.value.problems) == 3
    assert str(error.value).splitlines() == error.value.problems


def test_missing_argument_of_a_nested_part_is_told_when_it_looks_misspelt():
    config = edited('model.backbone', dict(type='ShapeOpenBackbone', nam='vit'))
    assert problems(config) == [
        "model.backbone.nam: ShapeOpenBackbone takes no argument 'nam': did you mean 'name'?"
    ]


def test_a_name_in_another_scope_is_pointed_to():
    config = edited('default_scope', 'mmengine')
    found = problems(config)
    assert (
        "model.type: there is no model 'ShapeModel': it is of the scope 'memengine'; "
        "write type='memengine.ShapeModel'"
    ) in found


def test_a_type_without_a_near_name_points_to_custom_imports():
    (found,) = problems(edited('param_scheduler', [dict(type='Zyx')]))
    assert found == (
        "param_scheduler.0.type: there is no parameter scheduler 'Zyx' "
        '(import a module of your own with custom_imports)'
    )


def test_a_misspelt_top_key_is_one_problem_not_two():
    config = base()
    config['train_dataloadr'] = config.pop('train_dataloader')
    assert problems(config) == ["unknown key 'train_dataloadr': did you mean 'train_dataloader'?"]


# -- every key of a config, misspelt ---------------------------------------------------------------


def slips(word):
    """A letter deleted, two swapped, one appended."""
    found = {word[:-1], word + 's', word[:1] + word[2:], word[1:2] + word[0] + word[2:]}
    return sorted(found - {word, ''})


def keys_of(node, path=()):
    """Paths of all keys below, except in dicts whose keys are the user's own."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            if key not in ('metainfo', 'data_prefix', 'custom_keys'):
                yield from keys_of(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from keys_of(value, (*path, index))


def misspelt(config, path, word):
    config = copy.deepcopy(config)
    node = config
    for key in path[:-1]:
        node = node[key]
    replaced = {word if key == path[-1] else key: value for key, value in node.items()}
    node.clear()
    node.update(replaced)
    return config


def keys_of_its_own(name):
    """Keys of a valid config; those in a part that 'plain' has too are tried there."""
    for path in keys_of(VALID[name]):
        mine, plain = VALID[name], VALID['plain'] if name != 'plain' else None
        for key in path[:-1]:
            mine = mine[key]
            known = isinstance(plain, dict) and key in plain
            plain = plain[key] if known or isinstance(plain, list) else None
        if mine != plain:
            yield path


@pytest.mark.parametrize(
    'name', ['plain', 'views', 'paramwise', 'wrapped data sets', 'environment']
)
def test_every_misspelt_key_is_refused(name):
    config = VALID[name]
    passed = []
    for path in keys_of_its_own(name):
        if path[0] in ('vars', 'custom', 'log_processor') and len(path) > 1:
            continue
        for word in slips(path[-1]):
            try:
                check_config(misspelt(config, path, word))
            except ConfigError:
                continue
            passed.append('.'.join(map(str, path)) + ' -> ' + word)
    assert not passed


def takes_anything(config, path):
    """Whether a key is a name that the user chooses, or an argument that is passed on to timm."""
    for key in path[:-1]:
        config = config[key]
    found = find_anywhere(config.get('type', ''), 'memengine')
    is_passed_on = found is not None and arguments_of(found[1]).open
    is_named = found is None or path[-1] not in arguments_of(found[1]).names | {'type'}
    return path[:-1] == ('default_hooks',) or (is_passed_on and is_named)


@pytest.mark.parametrize(
    'path',
    [
        pytest.param(p, id=p.stem, marks=() if p.stem == 'dino_vit' else pytest.mark.slow)
        for p in CONFIGS
    ],
)
def test_every_misspelt_key_of_our_configs_is_refused(path):
    config = Config.fromfile(path).to_dict()
    passed = []
    for key in keys_of(config):
        # MultiCrop checks the keys of its views itself, when it is built.
        if takes_anything(config, key) or 'views' in key[:-1]:
            continue
        for word in slips(key[-1])[:1]:
            try:
                check_config(misspelt(config, key, word))
            except ConfigError:
                continue
            passed.append('.'.join(map(str, key)) + ' -> ' + word)
    assert not passed


JUNK = [
    *(None, -1, 0.5, 'x', True, len, (1,), [None, 'a'], {1: 2}, {('a',): 1}),
    *(dict(type=kind) for kind in (None, 3, [], '', '.', 'X', 'a.b.c')),
    *(dict(type='SGD', _scope_=scope) for scope in (3, 'nope')),
    *([dict(type='x')], dict(a=dict(type='SGD'))),
]


@pytest.mark.parametrize('name', ['plain', 'views', 'paramwise'])
def test_no_value_makes_the_checker_itself_fail(name):
    refused = 0
    for path in keys_of_its_own(name):
        for value in JUNK:
            config = copy.deepcopy(VALID[name])
            node = config
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
            try:
                check_config(config)
            except ConfigError:
                refused += 1
    assert refused


def test_every_key_that_a_run_reads_is_known():
    ours = Path(memengine.__file__).parent
    read = re.compile(r"(?:self|runner)\.cfg\.get\(\s*'(\w+)'")
    found = set(read.findall(inspect.getsource(mmengine.runner.runner)))
    for path in ours.rglob('*.py'):
        found |= set(read.findall(path.read_text(encoding='utf-8')))
    assert {'model_wrapper_cfg', 'compile', 'sync_bn', 'trusted_globals'} <= found
    assert found <= known_keys({})


# -- names of the file's own -----------------------------------------------------------------------


def write(folder, **files):
    for name, text in files.items():
        (folder / f'{name}.py').write_text(text)
    return folder


BODY = """
model = dict(type='ShapeModel', backbone=dict(type='ShapeBackbone', depth=depth))
"""


def test_a_name_that_the_file_uses_is_no_setting(tmp_path):
    write(tmp_path, config='half = 3\ndepth = half * 2\n' + BODY)
    check_config(Config.fromfile(tmp_path / 'config.py'))


def test_a_name_that_the_file_does_not_use_is_refused(tmp_path):
    write(tmp_path, config='depth = 3\nhalf = [7]\n' + BODY)
    with pytest.raises(ConfigError, match="^unknown key 'half'; a key of your own goes below vars"):
        check_config(Config.fromfile(tmp_path / 'config.py'))


def test_names_of_base_configs_count(tmp_path):
    write(
        tmp_path,
        base='depth = 3\nwidth = 17\n' + BODY,
        middle="_base_ = './base.py'\n",
        config="""
_base_ = ['middle.py']
number = {{_base_.width}}
model = dict(head=dict(type='ShapeHead', num_classes=_base_.width, topk=[number]))
""",
    )
    check_config(Config.fromfile(tmp_path / 'config.py'))


def test_a_config_that_a_run_wrote_out_may_be_used_again(tmp_path):
    write(
        tmp_path,
        config="""
root = 'data/sub'
half = 17
depth = 2 * half
pipeline = [dict(type='ShapeResize', size=depth)]
unset = None
test_dataloader = dict(
    batch_size=2,
    sampler=dict(type='DefaultSampler'),
    dataset=dict(type='ShapeData', root=root + '/images', pipeline=pipeline),
)
test_cfg = dict(fp16=unset is not None)
test_evaluator = dict(type='ShapeMetric')
launcher = 'none'
"""
        + BODY,
    )
    config = Config.fromfile(tmp_path / 'config.py')
    config.work_dir = 'x'
    check_config(config)
    config.dump(tmp_path / 'written.py')
    assert 'root=' in (tmp_path / 'written.py').read_text().replace(' ', '')
    check_config(Config.fromfile(tmp_path / 'written.py'))
    config.model_wraper_cfg = {}
    config.dump(tmp_path / 'written.py')
    with pytest.raises(ConfigError, match="unknown key 'model_wraper_cfg'"):
        check_config(Config.fromfile(tmp_path / 'written.py'))


def test_configs_of_the_new_style(tmp_path):
    write(
        tmp_path,
        base='depth = 3\n',
        config='from mmengine.config import read_base\n'
        'from tests.engine.config_shapes import ShapeBackbone, ShapeModel\n'
        'with read_base():\n    from .base import *\n'
        'model = dict(type=ShapeModel, backbone=dict(type=ShapeBackbone, depth=depth))\n',
    )
    check_config(Config.fromfile(tmp_path / 'config.py'))


def test_an_import_that_fails_in_a_config_of_the_new_style(tmp_path):
    write(tmp_path, config='from torch.optim import SDG\nmodel = dict(type=SDG)\n')
    with pytest.raises(ConfigError, match=r'^model.type: Failed to import SDG .*line 1$'):
        check_config(Config.fromfile(tmp_path / 'config.py'))


# -- custom_imports --------------------------------------------------------------------------------


def test_custom_imports_register_before_names_are_looked_up(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(
        tmp_path,
        my_backbone_for_test='from memengine.registry import MODELS\n'
        '@MODELS.register_module()\nclass MyBackboneForTest:\n'
        '    def __init__(self, width):\n        pass\n',
    )
    config = edited('model.backbone', dict(type='MyBackboneForTest', widht=3))
    config['custom_imports'] = dict(imports=['my_backbone_for_test'])
    assert problems(config) == [
        "model.backbone.widht: MyBackboneForTest takes no argument 'widht': did you mean 'width'?"
    ]


@pytest.mark.parametrize(
    ('imports', 'said'),
    [
        (['no_such_module'], "custom_imports: there is no module 'no_such_module' in the current"),
        (['needs_more'], "custom_imports: 'needs_more' cannot be imported: No module named 'nope'"),
        (3, 'custom_imports must be dict\\(imports='),
    ],
)
def test_custom_imports_that_fail(tmp_path, monkeypatch, imports, said):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, needs_more='import nope\n')
    with pytest.raises(ConfigError, match=said):
        import_custom_modules(dict(custom_imports=dict(imports=imports)))


def test_custom_imports_that_may_fail_warn():
    with pytest.warns(UserWarning, match="there is no module 'no_such_module'"):
        import_custom_modules(
            dict(custom_imports=dict(imports='no_such_module', allow_failed_imports=True))
        )


def test_sampler_arguments_that_the_runner_supplies_may_be_left_out():
    check_config(base(train_dataloader=loader(drop_last=True)))


@pytest.mark.parametrize(
    ('option', 'said'),
    [
        ({'dropit': 2}, 'dropit: gamma is a number or a dict of .* below 1, got 2'),
        ({'dropit.gama': 0.5}, "dropit.gama: there is no such setting: did you mean 'gamma'"),
        (
            {'quantized_activations': 3},
            'quantized_activations: got 3, which is none of: True; 32, 8, 4',
        ),
        (
            {'activation_checkpointing': 0.5},
            'activation_checkpointing: got 0.5, which is none of: True; ',
        ),
        ({'dropit': 0.9, 'compile_blocks': True}, 'compile_blocks and dropit do not go together'),
        ({'custom_hooks': [dict(type='DropITHook', gamma=2)]}, 'custom_hooks: dropit: gamma is'),
    ],
)
def test_values_of_techniques_are_refused_before_anything_is_built(option, said):
    config = Config(base())
    config.merge_from_dict(option)
    with pytest.raises(ConfigError, match=said):
        check_config(config)


@pytest.mark.parametrize(
    'option',
    [{'dropit': 0.9}, {'dropit.gamma': 0.9}, {'quantized_activations': 4}, {'sync_bn': 'torch'}],
)
def test_values_of_techniques_that_are_taken(option):
    config = Config(base())
    config.merge_from_dict(option)
    check_config(config)


def test_a_wrong_temperature_is_told_what_it_may_be():
    config = load_config('simclr_vit')
    config.model.loss = dict(type='NTXentLoss', temperature='warm')
    with pytest.raises(ConfigError) as error:
        check_config(config)
    said = "model.loss.temperature: must be a number or a tensor, got 'warm'"
    assert error.value.problems == [said]
