"""A technique of another package, by an entry point or custom_imports, is one like any other."""

import sys

import pytest
import torch
from mmengine.config import Config

from memengine.engine.cli.main import main
from memengine.engine.cli.techniques import describe, list_techniques
from memengine.engine.config.check import ConfigError, check_config
from memengine.engine.hooks import register_hooks
from memengine.engine.techniques_of_config import refusals
from memengine.memory import SavedBytes
from memengine.technique import in_order, techniques
from memengine.technique.description import _find
from tests.composition import outcome, rows
from tests.docs_pages import ROOT
from tests.engine.config_shapes import base
from tests.engine.hooks.images import image_runner
from tests.engine.hooks.test_model_techniques import Network

SOURCE = '''
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from memengine.techniques.modules.saved_tensors import is_parameter
from memengine.techniques.modules.wrapped_forward import WrappedForward
from memengine.technique import Handle, Report, Settings, Technique, register, setting


class InBf16(WrappedForward, Handle):
    """A model whose saved tensors are kept in bfloat16."""

    setting = 'keep_in_bf16'

    def __init__(self, model, min_numel):
        super().__init__('', model)
        self.min_numel, self.kept = min_numel, 0

    def __call__(self, *args, **kwargs):
        with saved_tensors_hooks(self.pack, lambda packed: packed[0].to(packed[1])):
            return self.plain(*args, **kwargs)

    def pack(self, tensor):
        keeps = tensor.is_floating_point() and tensor.numel() >= self.min_numel
        if is_parameter(tensor) or not keeps:
            return tensor, tensor.dtype
        self.kept += 1
        return tensor.bfloat16(), tensor.dtype

    def report(self):
        if not self.kept:
            return Report(left='keep_in_bf16: nothing is large enough; lower min_numel')
        return Report(f'keep_in_bf16: {self.kept} tensors in bfloat16')


@dataclass(frozen=True)
class KeepInBf16Settings(Settings):
    min_numel: int = setting(1024, help='smaller tensors stay as they are', unit='elements', low=0)
    strict: bool = setting(True, help='whether nothing to keep so is an error')


def apply(model, settings):
    handle = InBf16(model, settings.min_numel)
    handle.begin()
    return handle


TECHNIQUE = register(Technique(
    key='keep_in_bf16',
    title='saved tensors in bfloat16',
    settings=KeepInBf16Settings,
    apply=apply,
    shorthand='min_numel',
    after=('activation_checkpointing',),
    before=('activation_offload',),
    conflicts={
        'compile': 'its graphs save what they like; set one of them',
        'dropit': 'its codes would be rounded, too; use dropit.value_bits=16',
    },
    exactness='lossy',
    use_when='half of the bytes are enough',
    saves='half of what is saved',
    price='two casts',
    example=KeepInBf16Settings(min_numel=1),
))
'''


@pytest.fixture
def outside(tmp_path, monkeypatch, techniques_of_its_own):
    """A module that a config names, and nothing left of it afterwards."""
    (tmp_path / 'my_bf16.py').write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield Config(dict(custom_imports=dict(imports=['my_bf16'])))
    sys.modules.pop('my_bf16', None)


def test_by_custom_imports(outside, tmp_path):
    config = dict(base(), **outside)
    check_config({**config, 'keep_in_bf16': 64})
    check_config({**config, 'custom_hooks': [dict(type='KeepInBf16Hook', min_numel=64)]})
    for value, said in (
        (dict(min_nume=3), "keep_in_bf16.min_nume: .* did you mean 'min_numel'"),
        (-1, 'keep_in_bf16: min_numel is a whole number, at least 0, got -1'),
        ('x', "keep_in_bf16: got 'x', which is none of: True; a whole number"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_config({**config, 'keep_in_bf16': value})
    with pytest.raises(ConfigError, match='dropit and keep_in_bf16 .* use dropit.value_bits=16'):
        check_config({**config, 'keep_in_bf16': True, 'dropit': True})

    assert 'keep_in_bf16' in list_techniques()
    assert 'min_numel: a whole number, at least 0 (elements); default 1024' in describe(
        'keep_in_bf16'
    )
    keys = [technique.key for technique in in_order(techniques().values())]
    at = keys.index
    assert at('activation_checkpointing') < at('keep_in_bf16') < at('activation_offload')
    assert refusals({'keep_in_bf16': 1, 'compile': True})


def train(folder, *hooks, **cfg):
    torch.manual_seed(0)
    run = image_runner(folder, *hooks, model=Network(), epochs=1, cfg=Config(cfg))
    run.train()
    assert all('forward' not in vars(module) for module in run.model.modules())
    return next(folder.glob('*/*.log')).read_text()


def test_it_trains_by_key_and_by_hook(outside, tmp_path):
    check_config({**base(), **outside})
    log = train(tmp_path / 'key', keep_in_bf16=64, activation_checkpointing=['blocks'])
    assert "order: activation_checkpointing(modules=['blocks']), keep_in_bf16(min_numel=64)" in log
    assert 'tensors in bfloat16' in log
    register_hooks()
    log = train(tmp_path / 'hook', dict(type='KeepInBf16Hook', min_numel=64))
    assert 'tensors in bfloat16' in log
    with pytest.raises(ValueError, match='nothing is large enough.*strict=False'):
        train(tmp_path / 'strict', keep_in_bf16=10**9)
    assert 'nothing is large' in train(
        tmp_path / 'lenient', keep_in_bf16=dict(min_numel=10**9, strict=False)
    )


def test_it_is_in_the_test_of_pairs(outside):
    check_config({**base(), **outside})
    by_name = {row.name: row for row in rows()}
    mine = by_name['saved tensors in bfloat16']
    assert outcome(by_name['dropped activations (DropIT)'], mine) == 'refused'
    assert outcome(by_name['activation checkpointing'], mine) == 'lossy'
    assert outcome(by_name['gradient cache'], mine) == 'lossy'


def test_in_plain_pytorch(outside):
    check_config({**base(), **outside})
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    technique = techniques()['keep_in_bf16']
    kept = []
    for settings in (technique.read(10**9), technique.read(1)):
        handle = technique.apply(model, settings)
        with SavedBytes(model) as saved:
            loss = model(torch.randn(32, 64)).square().sum()
        kept.append(saved.live_bytes)
        loss.backward()
        handle.undo()
    outside_of_it = 32 * 64 * 4  # what square saves
    assert kept[1] - outside_of_it == (kept[0] - outside_of_it) / 2
    assert 'forward' not in vars(model)


def write_entry_point(folder, module):
    info = folder / 'my_bf16-1.0.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: my-bf16\nVersion: 1.0\n')
    (info / 'entry_points.txt').write_text(f'[memengine.techniques]\nkeep = {module}:TECHNIQUE\n')


def test_by_an_entry_point(outside, tmp_path, capsys):
    write_entry_point(tmp_path, 'my_bf16')
    _find.cache_clear()
    assert not main(['techniques', 'keep_in_bf16'])
    wrong = ['keep_in_bf16.min_nume=3', 'dropit=2']
    assert main(['train', str(ROOT / 'configs/dino_vit.py'), '--cfg-options', *wrong])
    said = capsys.readouterr()
    assert 'keep_in_bf16.min_numel: a whole number' in said.out
    assert "keep_in_bf16.min_nume: there is no such setting: did you mean 'min" in said.err
    assert 'dropit: gamma is a number' in said.err


def test_an_entry_point_that_cannot_be_imported(tmp_path, monkeypatch, capsys):
    write_entry_point(tmp_path, 'my_bf17')
    monkeypatch.syspath_prepend(tmp_path)
    _find.cache_clear()
    assert main(['techniques'])
    said = "entry point keep of memengine.techniques: No module named 'my_bf17'"
    assert said in capsys.readouterr().err
