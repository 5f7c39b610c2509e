"""What is misspelt or of a wrong value is refused before torch and MMEngine are imported."""

import ast
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import timm

from memengine.engine.config.before_torch.check import check_text
from memengine.engine.config.before_torch.sources import (
    arguments_of_network,
    networks,
    of_other_packages,
    top_keys,
)
from memengine.engine.config.check import check_config, known_keys
from memengine.engine.config.error import ConfigError
from memengine.engine.config.file import load_config, merge_options
from memengine.engine.config.step_of_config import check_model
from tests.docs_pages import ROOT
from tests.engine.config.mutations import REMOVED, mutations, shipped
from tests.test_configs import CONFIGS

BELOW = "model.head.nlayer: DINOHead takes no argument 'nlayer': did you mean 'nlayers'?"
VALUE = "model.head.nlayers: must be a whole number, got 'x'"
BUDGET = "memory_budget: must be a size such as '20GiB', or None, got 1.5"
GAMMA = 'dropit: gamma is a number or a dict of (a number), at least 0 and below 1, got 1.9'


def write(tmp_path, text, name='config.py'):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize(
    ('said', 'arguments'),
    [
        ("unknown key 'modl': did you mean 'model'?", ['typo.py']),
        ("unknown key 'modl': did you mean 'model'?", ['fine.py', '--cfg-options', 'modl.type=1']),
        (BELOW, ['fine.py', '--cfg-options', 'model.head.nlayer=1']),
        (VALUE, ['fine.py', '--cfg-options', 'model.head.nlayers=x']),
        (GAMMA, ['fine.py', '--cfg-options', 'dropit=1.9']),
        (BUDGET, ['fine.py', '--cfg-options', 'memory_budget=1.5']),
        ('there is no config file dino_vitt: did you mean dino_vit?', ['dino_vitt']),
    ],
)
@pytest.mark.parametrize('command', ['train', 'predict'])
def test_what_is_misspelt_is_answered_without_torch(tmp_path, command, arguments, said):
    write(tmp_path, "modl = dict(type='DINO')", 'typo.py')
    write(tmp_path, "model = dict(type='DINO', head=dict(type='DINOHead'))", 'fine.py')
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from memengine.engine.cli.main import main
status = main({[command, *arguments]!r})
print(status, [name for name in ('torch', 'mmengine', 'numpy') if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == f'memengine: error: {said}\n'
    assert done.stdout == '1 []\n'


VIEW = {'type': 'MultiCrop', 'views': [{'num': 2, 'pipeline': []}]}
VIEW['views'][0]['pipeline'] = [
    dict(type='torchvision/RandomResizedCrop', size=16, scal=(0.6, 1.0)),
    dict(type='torchvision/RandomAffin', degrees=15),
]
MISSPELT = {
    'optim_wrapper': dict(optimzer=1),
    'model': dict(
        backbon=1,
        backbone=dict(drop_path_rat=0.1),
        head=dict(type='DINOHed'),
        teacher=dict(type='Nothing'),
    ),
    'train_dataloader': dict(batchsize=2, dataset=dict(pipeline=[dict(type='MultiCrops'), VIEW])),
    'param_scheduler': [dict(type='LinearLR', start_facto=0.1)],
    'default_hooks': dict(checkpoint=dict(interva=3)),
    'val_evaluator': dict(kk=3),
    'train_cfg': dict(max_epoch=3),
    'custom_hooks': [dict(type='CollapsHook'), dict(type='CollapseHook', intervl=1)],
    'dropit': dict(gama=0.5),
}


def test_below_the_top_as_the_whole_check_says_it(tmp_path):
    text = ''.join(f'{key} = {value!r}\n' for key, value in MISSPELT.items())
    file = write(tmp_path, f"_base_ = 'memengine::dino_vit.py'\n{text}")
    with pytest.raises(ConfigError) as early:
        check_text(file, {'model.head.nlayer': 1})
    config = load_config(file)
    config.merge_from_dict({'model.head.nlayer': 1})
    with pytest.raises(ConfigError) as whole:
        check_config(config)
    assert len(early.value.problems) == 16, early.value.problems
    assert {*early.value.problems} <= {*whole.value.problems}


NO_WORDS = {
    'foo': 1,
    'optim_wrapper.optimizer.learning_rate': 0.1,
    'optim_wrapper.optimizer.type': 'AdamWW',
    'optim_wrapper.precision': 'bf61',
    'model.qwertz': 1,
    'model.centering': 'sinkhron',
    'model.backbone.model_name': 'vit_tinny_patch16_224',
    'train_cfg.iters': 3,
    'train_dataloader.workers': 2,
    'train_dataloader.collate_fn.type': 'stack_view',
    'default_hooks.chekpoint': {'type': 'CheckpointHook'},
    'default_hooks.mine': {'interval': 3},
    'env_cfg.mp_cfg.threads': 1,
    'randomness.sed': 3,
}
WORDS_OF_OTHERS = {
    'model.size': 3,
    'optim_wrapper.chunk_size': 4,
    'train_cfg.epochs': 3,
    'train_dataloader.dataset.name': 'x',
    'log_processor.windw_size': 3,
}
VALUES = {
    'optim_wrapper.optimizer.lr': 'abc',
    'optim_wrapper.optimizer.betas': 0.9,
    'optim_wrapper.clip_grad.max_norm': -1,
    'optim_wrapper.clip_grad.max_nrom': 1,
    'param_scheduler.0.begin': 'abc',
    'param_scheduler.0.start_factor': 3,
    'dropit': 1.9,
    'dropit.strategy': 'mimk',
    'quantized_activations': 9.5,
    'quantized_activations.bits': 17,
    'activation_checkpointing.modules': 3,
    'sync_bn': 'torhc',
    'model.backbone.depth': 'two',
    'model.backbone.img_size': 'abc',
    'model.head.use_bn': 'yes',
    'model.local_crops': -1,
    'train_cfg.max_epochs': 1.5,
    'train_dataloader.batch_size': 0,
    'train_dataloader.num_workers': 'two',
    'train_dataloader': 3,
    'train_dataloader.shuffle': True,
    'default_hooks.checkpoint.interval': 'often',
    'val_evaluator.k': 'many',
    'randomness.seed': 'abc',
    'resume': 'yes',
    'load_from': 3,
    'launcher': 'pytroch',
    'memory': 3,
    'memory_budget': 1.5,
    'env_cfg.mp_cfg.mp_start_method': 'frok',
}


@pytest.mark.parametrize(
    ('path', 'value'), [*NO_WORDS.items(), *WORDS_OF_OTHERS.items(), *VALUES.items()]
)
def test_what_is_nothing_there_as_the_whole_check_says_it(path, value):
    said = problems_early(ROOT / 'configs/dino_vit.py', {path: value})
    config = load_config('dino_vit')
    with pytest.raises(ConfigError) as whole:
        merge_options(config, {path: value})
        check_config(config)
    assert len(said) == 1
    assert [it.partition(' (it takes')[0] for it in said] == [
        it.partition(' (it takes')[0] for it in whole.value.problems
    ]


@pytest.mark.parametrize('key', ['qwertz', 'drop_path'])
def test_an_argument_that_timm_s_network_does_not_take(key):
    said = problems_early(ROOT / 'configs/dino_vit.py', {f'model.backbone.{key}': 0.1})
    assert [it.partition(': did')[0] for it in said] == [
        f"model.backbone.{key}: TimmBackbone takes no argument '{key}'"
    ]
    config = load_config('dino_vit')
    config.model.backbone[key] = 0.1
    with pytest.raises(ValueError, match=f"unexpected keyword argument '{key}'"):
        check_model(config)


@pytest.mark.parametrize('key', ['features_only', 'pretrained_cfg', 'norm_layer'])
def test_what_builds_timm_s_networks_may_take_more(key):
    check_text(ROOT / 'configs/dino_vit.py', {f'model.backbone.{key}': None})


def test_timm_s_own_arguments_of_its_networks_are_never_refused():
    sure = 0
    for file in ('convnext', 'levit', 'resnet', 'vgg'):
        text = Path(timm.__file__).with_name('models').joinpath(f'{file}.py').read_text()
        made = [it for it in ast.parse(text).body if isinstance(it, ast.FunctionDef)]
        for function in [it for it in made if it.name in networks()]:
            calls = [it for it in ast.walk(function) if isinstance(it, ast.Call)]
            dicts = [it for it in calls if ast.unparse(it.func) == 'dict']
            keys = frozenset(word.arg for it in dicts for word in it.keywords if word.arg)
            taken, takes_others = arguments_of_network(function.name, keys)
            assert keys <= taken or takes_others, function.name
            sure += not takes_others
    assert sure > 50


def problems_early(file, options):
    with pytest.raises(ConfigError) as error:
        check_text(file, options)
    return error.value.problems


@pytest.mark.parametrize('name', ['config.yaml', 'config.json'])
def test_in_yaml_and_json(tmp_path, name):
    text = '{"_base_": "memengine::dino_vit.py", "model": {"head": {"nlayer": 1}}}'
    file = write(tmp_path, text, name)
    assert problems_early(file, {}) == [BELOW]
    write(tmp_path, text.replace('"model"', '"modl"'), name)
    assert problems_early(file, {}) == ["unknown key 'modl': did you mean 'model'?"]


def test_in_what_a_run_has_written(tmp_path):
    config = load_config('dino_vit')
    config.work_dir, config.modl, config.model.head.nlayer = 'x', 'a name that it used', 1
    config.dump(tmp_path / 'written.py')
    assert problems_early(tmp_path / 'written.py', {}) == [BELOW]
    said = problems_early(tmp_path / 'written.py', {'lod_from': 1})
    assert said == ["unknown key 'lod_from': did you mean 'load_from'?"]


def test_a_technique_of_an_installed_package_goes_by_its_own_key(tmp_path, monkeypatch):
    file = write(tmp_path, "dropti = dict(share=0.5)\nmodel = dict(type='DINO')")
    with pytest.raises(ConfigError, match="did you mean 'dropit'"):
        check_text(file, {'dropti.share': 1})
    write(tmp_path, "TECHNIQUE = Technique(key='dropti')", 'others_technique.py')
    write(tmp_path / 'others-1.0.dist-info', 'Metadata-Version: 2.1\nName: others', 'METADATA')
    entries = '[memengine.techniques]\ndropti = others_technique\n'
    write(tmp_path / 'others-1.0.dist-info', entries, 'entry_points.txt')
    monkeypatch.syspath_prepend(tmp_path)
    of_other_packages.cache_clear()
    check_text(file, {'dropti.share': 1})
    monkeypatch.undo()
    of_other_packages.cache_clear()


def refused_early(count, seed):
    """Options that are wrong in shipped configs, with what is said of them at once."""
    for made in mutations(count, seed):
        # A type under another key still stands at its own here, where it is only added to.
        is_type = made.kind == 'key' and made.changes[1][0].endswith('.type')
        if made.kind in ('key', 'name', 'type', 'range') and made.value is not REMOVED:
            try:
                check_text(ROOT / made.config, {made.path: made.value} if not is_type else {})
            except ConfigError as error:
                yield made, error.problems


@pytest.mark.parametrize(('count', 'seed'), [(150, 1)])
def test_what_is_refused_early_is_wrong(count, seed):
    found = list(refused_early(count, seed))
    assert len(found) > count / 3
    for made, said in found:
        config = copy.deepcopy(shipped(made.config))
        with pytest.raises(ConfigError) as whole:
            merge_options(config, {made.path: made.value})
            check_config(config)
        # Of a value that is wrong in two ways either may be said.
        same = ': did' if made.kind in ('key', 'name') else ':'
        assert all(it.partition(same)[0] in str(whole.value) for it in said), (made, said)


def test_keys_are_those_of_the_whole_check():
    assert top_keys() == known_keys({})


def test_no_key_that_means_something_is_refused(tmp_path):
    keys = sorted(known_keys({}))
    file = write(tmp_path, ''.join(f'{key} = dict()\n' for key in keys))
    check_text(file, {f'{key}.entry': 1 for key in keys})


@pytest.mark.parametrize('name', CONFIGS)
def test_configs_pass(name):
    check_text(ROOT / name, {'train_cfg.max_epochs': 1})


def test_all_is_said_at_once_and_as_the_whole_check_says_it(tmp_path):
    write(tmp_path, 'train_cgf = dict(max_epochs=1)', 'base.py')
    text = (
        "_base_ = 'base.py'\nmodel = dict(type='DINO', head=dict(type='DINOHead'))\nresme = True\n"
    )
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as early:
        check_text(file, {'lod_from': 'x'})
    with pytest.raises(ConfigError) as whole:
        check_config(load_config(file))
    assert early.value.problems == [
        "unknown key 'lod_from': did you mean 'load_from'?",
        "unknown key 'resme': did you mean 'resume'?",
        "unknown key 'train_cgf': did you mean 'train_cfg'?",
    ]
    assert set(early.value.problems[1:]) <= set(whole.value.problems)


@pytest.mark.parametrize(
    'text',
    [
        'modl = dict()\nmodel = modl',  # a name of the file's own
        "custom_imports = dict(imports=['mine'])\nmodl = dict()",  # which may be mine's
        "runner_type = 'Mine'\nmodl = dict()",
        'model = dict()\nmodl = dict()\nwork_dir = "x"',  # as a run writes it
        'modl = len([1])',
        "default_scope = 'mine'\nmodel = dict(type='DINO', backbon=1)",
        "model = dict(type='DINO', backbon=1)\nmodel.pop('backbon')",
        "model = dict(type=str('DINO'), backbon=1)",
        'modl = (',
        'something = 3\ndel something',
    ],
)
def test_what_the_text_does_not_tell_is_left_to_the_whole_check(tmp_path, text):
    check_text(write(tmp_path, text), {})


@pytest.mark.parametrize('text', ['model: {{ _base_.model }}', '- 1', 'a b: 1', '{', '1: 2'])
def test_yaml_that_says_something_else_is_left_to_the_whole_check(tmp_path, text):
    check_text(write(tmp_path, text, 'config.yaml'), {})
