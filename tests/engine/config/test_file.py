"""Reading a config file: every way in which that fails is a sentence that says where."""

import json
from pathlib import Path

import pytest
from mmengine.config import Config

from memengine.engine.config.before_torch.check import check_text
from memengine.engine.config.check import ConfigError
from memengine.engine.config.file import find_config, load_config, merge_options


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').mkdir()
    return tmp_path


def write(**files):
    for name, text in files.items():
        with open(f'{name}.py', 'w', encoding='utf-8') as file:
            file.write(text)


def said(path):
    with pytest.raises(ConfigError) as error:
        load_config(path)
    return str(error.value)


def test_a_config_is_read(folder):
    write(base='a = dict(x=1, y=2)\n', config="_base_ = 'base.py'\na = dict(x=3)\n")
    assert load_config('config.py').a == dict(x=3, y=2)


def test_a_missing_file_names_those_like_it(folder):
    (folder / 'configs' / 'method').mkdir()
    (folder / 'configs' / 'method' / 'dino_vit.py').touch()
    like = 'configs/method/dino_vit.py'
    assert said('dino_vt.py') == f'there is no config file dino_vt.py: did you mean {like}?'
    assert said('confgs/dino_vit.py').endswith(f'did you mean {like}?')
    assert said('configs/method/dino.py').endswith(f'did you mean {like}?')
    assert said('xyz.py') == 'there is no config file xyz.py'


def test_a_folder_or_another_kind_of_file(folder):
    write(**{'configs/a': 'x = 1\n'})
    assert said('configs') == 'configs is a folder; give a config file, such as configs/a.py'
    (folder / 'a.txt').touch()
    assert said('a.txt').startswith('a.txt is no config file: its name must end in .py')


def test_python_errors_say_file_and_line(folder):
    write(syntax='a = 1\nb = dict(\n  c=,\n)\n', name='a = 1\nb = dict(\n  c=d,\n)\n')
    # What Python says of it changes from version to version.
    assert said('syntax.py').startswith('syntax.py, line 3: ')
    assert said('name.py') == "name.py, line 3: NameError: name 'd' is not defined"


def test_calling_what_is_imported_lazily(folder):
    write(lazy='from torch.optim import SGD\nlr = 3\noptimizer = SGD([])\n')
    assert said('lazy.py').startswith(
        'lazy.py, line 3: what a config imports is imported only when'
    )


def test_errors_of_a_base_config_name_the_base(folder):
    write(
        syntax='a = (\n',
        key="a = 1\nb = {}['c']\n",
        one="_base_ = ['syntax.py']\n",
        two="_base_ = 'key.py'\n",
        three="_base_ = 'two.py'\n",
        four="_base_ = ['key2.py', 'key3.py']\n",
        key2='a = 1\n',
        key3='a = 2\n',
    )
    assert said('one.py').startswith('syntax.py, line 1: ')
    assert said('two.py') == said('three.py') == 'key.py, line 2: KeyError: c'
    assert said('four.py').startswith('four.py: KeyError: Duplicate key is not allowed among bases')


def test_a_missing_base_names_who_wants_it(folder):
    write(
        runtime='a = 1\n',
        one="_base_ = ['runtim.py']\n",
        two="_base_ = 'one.py'\n",
        new='from mmengine.config import read_base\nwith read_base():\n    from .runtim import *\n',
    )
    wanted = 'its base config runtim.py does not exist: did you mean runtime.py?'
    assert said('one.py') == said('two.py') == f'one.py: {wanted}'
    assert said('new.py') == f'new.py: {wanted}'


@pytest.mark.parametrize('suffix', ['py', 'json'])
def test_a_config_that_builds_on_itself_is_named(folder, suffix):
    bases = dict(one='two', two='three', three='two', alone='alone')
    for name, base in bases.items():
        base = f'{base}.{suffix}'
        text = f'_base_ = {base!r}\n' if suffix == 'py' else json.dumps({'_base_': base})
        Path(f'{name}.{suffix}').write_text(text)
    turns = f'two.{suffix}: its base config three.{suffix} builds on it in turn'
    assert said(f'one.{suffix}') == said(f'two.{suffix}') == turns
    itself = f'alone.{suffix}: its base config alone.{suffix} builds on it in turn'
    assert said(f'alone.{suffix}') == itself
    check_text(f'one.{suffix}', {})  # before torch is there its text tells nothing


def test_bases_that_are_no_paths_are_named(folder):
    write(one='_base_ = 3\n', two="_base_ = ['one.py', None]\n", three="_base_ = 'one.py'\n")
    wanted = 'one.py: _base_ must be a path or paths, got 3'
    assert said('one.py') == said('three.py') == wanted
    assert said('two.py') == "two.py: _base_ must be a path or paths, got ['one.py', None]"


def config():
    return Config(
        dict(
            model=dict(type='X', backbone=dict(depth=1)),
            param_scheduler=[dict(type='A'), dict(type='B', end=1)],
            train_cfg=dict(max_epochs=3),
            val_cfg=None,
            custom_hooks=(dict(type='H'),),
            base_lr=3,
        )
    )


def merged(**options):
    cfg = config()
    merge_options(cfg, {key.replace('__', '.'): value for key, value in options.items()})
    return cfg


def test_options_are_merged():
    assert merged(train_cfg__max_epochs=1).train_cfg.max_epochs == 1
    assert merged(param_scheduler__1__end=5).param_scheduler[1] == dict(type='B', end=5)
    assert merged(model__backbone__width=2).model.backbone == dict(depth=1, width=2)
    assert merged(val_cfg=None, compile=True, visualizer__type='V').visualizer == dict(type='V')
    assert merged(vars__mine=1, custom__yours__deep=2).custom.yours.deep == 2
    replaced = merged(model=dict(_delete_=True, type='Y'))
    assert replaced.model == dict(type='Y')
    one = dict(_delete_=True, type='C', inner=dict(_delete_=True, type='D'))
    assert merged(param_scheduler__1=one).param_scheduler[1] == dict(type='C', inner={'type': 'D'})


@pytest.mark.parametrize(
    ('path', 'value', 'problem'),
    [
        ('optim_wraper.lr', 1, "unknown key 'optim_wraper': did you mean 'optim_wrapper'?"),
        ('spam', 1, "unknown key 'spam'; a key of your own goes below vars"),
        (
            'base_lr',
            1,
            "--cfg-options base_lr: 'base_lr' is a name that the config file uses itself",
        ),
        (
            'train_cfg.max_epochs.x',
            1,
            'train_cfg.max_epochs.x: train_cfg.max_epochs is 3, which has no',
        ),
        (
            'val_cfg.fp16',
            True,
            'val_cfg.fp16: val_cfg is None, which has no entries; set val_cfg as a',
        ),
        (
            'param_scheduler.5.end',
            1,
            'param_scheduler.5.end: param_scheduler has no entry 5; its entries are 0 to 1',
        ),
        (
            'param_scheduler.end',
            1,
            'param_scheduler.end: param_scheduler is a list; name an entry by',
        ),
        (
            'custom_hooks.0.type',
            'J',
            "custom_hooks.0.type: custom_hooks is ({'type': 'H'},), which has",
        ),
        ('model', 'Y', 'model: is a dict; set its entries one by one, as model.type=...'),
        ('model..x', 1, '--cfg-options model..x: a path is keys joined by single dots'),
    ],
)
def test_options_that_do_not_fit(path, value, problem):
    cfg = config()
    with pytest.raises(ConfigError) as error:
        merge_options(cfg, {path: value, 'train_cfg.max_epochs': 1})
    assert str(error.value).startswith(problem)
    assert cfg.to_dict() == config().to_dict(), 'nothing may be merged when one option is wrong'


@pytest.mark.parametrize('suffix', ['py', 'yaml'])
def test_a_base_that_comes_along_is_found_from_anywhere(folder, suffix):
    sign = {'py': '= ', 'yaml': ': '}[suffix]
    bases = "['memengine::dino_vit.py', 'memengine::_base_/techniques/fsdp.py']"
    Path(f'mine.{suffix}').write_text(f'_base_{sign}{bases}\nload_from{sign}"x"\n')
    cfg = load_config(f'mine.{suffix}')
    shipped = load_config('dino_vit')
    assert (cfg.model, cfg.load_from) == (shipped.model, 'x')
    assert cfg.model_wrapper_cfg.type == 'FullyShardedDataParallel'
    cfg.dump('dumped.py')
    assert load_config('dumped.py').to_dict() == cfg.to_dict()


def test_a_base_that_does_not_come_along(folder):
    write(one="_base_ = 'memengine::dino_vt.py'\n", two="_base_ = 'mmdet::none/none.py'\n")
    assert 'dino_vt.py does not exist: did you mean ' in said('one.py')
    assert said('two.py').startswith('two.py: ModuleNotFoundError: ')  # MMEngine's own


def test_a_config_that_comes_along_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config('dino_vit').model.type == 'DINO'
    assert find_config('dino/dino_vit-small-p16_8xb64-100e_imagenet').is_file()
    (tmp_path / 'dino_vit').write_text('mine')
    assert find_config('dino_vit') == Path('dino_vit')  # what is there goes first
    assert find_config('nonsense') == Path('nonsense')
