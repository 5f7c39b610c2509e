"""What is loaded has to fit, whole or in the part that was asked for."""

import re

import pytest
import torch
from mmengine.hooks import EMAHook
from safetensors.torch import save_file
from torch import nn

from memengine.engine.checkpoint.convert import convert
from memengine.engine.checkpoint.files import CheckpointError
from tests.engine.toy import Losses, ToyData, ToyModel, params, toy_runner

EVALUATE = dict(
    test_dataloader=dict(dataset=ToyData(), sampler=dict(type='DefaultSampler', shuffle=False)),
    test_cfg=dict(),
    test_evaluator=dict(type='DumpResults', out_file_path='unused.pkl'),
)


class Probe(ToyModel):
    """The toy model's network under another name, and a head that is new."""

    def __init__(self):
        super().__init__()
        self.backbone = self.net
        del self.net
        self.head = nn.Linear(1, 1)

    def forward(self, x, y, mode='loss'):
        out = self.head(self.backbone(x))
        return {'loss': (out - y).square().mean()} if mode == 'loss' else list(out)


def pretrained(path, *parts):
    """A checkpoint with the toy model's network below each of these names."""
    net = ToyModel().net.state_dict()
    state = {
        f'{part}.{name}': value + i for i, part in enumerate(parts) for name, value in net.items()
    }
    torch.save({'meta': {}, 'state_dict': state}, path)
    return state


def load(tmp_path, load_from, model=None, **options):
    runner = toy_runner(tmp_path / 'run', model=model or Probe(), load_from=load_from, **options)
    runner.train_loop  # noqa: B018 (built when asked for)
    runner.call_hook('before_run')
    runner.load_or_resume()
    return runner


@pytest.mark.fault(
    '`load_from` with a checkpoint of which nothing, or not all, fits',
    'refused, with what is missing, surplus and of another shape, and the part that would fit',
)
def test_what_does_not_fit_is_refused_and_what_would_is_named(tmp_path):
    path = str(tmp_path / 'dino.pth')
    pretrained(path, 'student.backbone', 'teacher.backbone')
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, path)
    said = (
        r'dino.pth: no weight fits the model: 10 missing \(backbone.0.weight, backbone.0.bias, .*,'
        r' ...\), 18 that the model does not have \(student.backbone.0.weight, .*\); it '
        r'holds all of backbone as student.backbone and as teacher.backbone: set load_from=dict\('
        r"path='.*dino.pth', part='teacher.backbone', into='backbone'\) to load that$"
    )
    assert re.search(said, str(caught.value)), caught.value


def test_the_part_that_the_message_names_is_loaded(tmp_path):
    path = str(tmp_path / 'dino.pth')
    state = pretrained(path, 'student.backbone', 'teacher.backbone')
    asked = dict(path=path, part='teacher.backbone', into='backbone')
    runner = load(tmp_path, asked, custom_hooks=[EMAHook()])
    (ema,) = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
    for name, value in params(runner).items():
        if name.startswith('backbone.'):
            assert torch.equal(value, state[f'teacher.{name}'])
            assert torch.equal(value, ema.ema_model.module.state_dict()[name]), 'the average, too'


@pytest.mark.parametrize('part', ['encoder', ''])
def test_the_only_part_that_fits_is_found(tmp_path, part):
    path = str(tmp_path / 'one.pth')
    torch.manual_seed(1)
    net = ToyModel().net.state_dict()
    torch.save({f'{part}.{k}'.lstrip('.'): v for k, v in net.items()}, path)
    runner = load(tmp_path, path)
    for name, value in net.items():
        assert torch.equal(params(runner)[f'backbone.{name}'], value)
    with pytest.raises(CheckpointError, match='no weight fits'):  # of which all is wanted
        toy_runner(tmp_path, model=Probe(), load_from=path, **EVALUATE).test()


@pytest.mark.parametrize('prefix', ['module.', 'module._orig_mod.', '_orig_mod.'])
@pytest.mark.parametrize('whole', [True, False])
def test_what_ddp_and_compiling_put_before_names_is_taken_away(tmp_path, prefix, whole):
    net = ToyModel().net.state_dict()
    below = 'net.' if whole else ''
    state = {f'{prefix}{below}{name}': value for name, value in net.items()}
    torch.save(state, tmp_path / 'other.pth')
    runner = load(tmp_path, str(tmp_path / 'other.pth'), model=ToyModel())
    for name, value in runner.model.net.state_dict().items():
        assert torch.equal(value, net[name])


class Renamed(ToyModel):
    """The toy model's network under another name.

    Args:
        name: The name.
    """

    def __init__(self, name):
        super().__init__()
        self.name = name
        setattr(self, name, self.net)
        del self.net

    def forward(self, x, y, mode='loss'):
        out = self.get_submodule(self.name)(x)
        return {'loss': (out - y).square().mean()} if mode == 'loss' else list(out)


@pytest.mark.parametrize('name', ['module', 'modules_of_it'])
def test_a_module_that_is_called_as_ddps_prefix_is_resumed(tmp_path, name):
    for stop in (1, 2):
        train_cfg = dict(by_epoch=True, max_epochs=1, stop_at_iter=stop)
        resume = stop == 2
        toy_runner(tmp_path, train_cfg=train_cfg, model=Renamed(name), resume=resume).train()
    assert (tmp_path / 'iter_2.pth').exists()


def test_a_new_head_is_asked_for_by_naming_what_is_not_new(tmp_path):
    path = tmp_path / 'run.pth'
    torch.save({'state_dict': {**Probe().state_dict(), 'head.weight': torch.ones(7, 1)}}, path)
    with pytest.raises(
        CheckpointError,
        match=r'1 of another shape \(head.weight \(7, 1\) for \(1, 1\)\).*'
        r"part='backbone'\)",
    ):
        load(tmp_path, str(path))
    assert load(tmp_path, dict(path=str(path), part='backbone'))._has_loaded


def test_what_fits_is_loaded_without_strict_and_the_rest_is_said(tmp_path, monkeypatch):
    path = tmp_path / 'run.pth'
    torch.save({**Probe().state_dict(), 'head.weight': torch.ones(7, 1)}, path)
    said = []
    monkeypatch.setattr('logging.Logger.warning', lambda self, text, *args: said.append(text))
    load(tmp_path, dict(path=str(path), strict=False))
    assert any('10 weights fit, 1 of another shape (head.weight' in text for text in said), said
    torch.save({'other': torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match='no weight fits the model'):
        load(tmp_path, dict(path=str(path), strict=False))


def test_a_part_that_is_not_whole_is_refused(tmp_path):
    path = str(tmp_path / 'a.pth')
    state = pretrained(path, 'backbone')
    torch.save({k: v for k, v in state.items() if k != 'backbone.3.bias'}, path)
    with pytest.raises(CheckpointError, match=r'fit backbone: 1 missing \(backbone.3.bias\)$'):
        load(tmp_path, dict(path=path, part='backbone'))


@pytest.mark.fault(
    '`memengine test` with weights that do not fit the model', 'refused; no figure is printed'
)
def test_no_figure_without_the_weights(tmp_path):
    path = str(tmp_path / 'dino.pth')
    pretrained(path, 'student.backbone')
    with pytest.raises(CheckpointError, match=r'no weight fits the model: 10 .*, \.\.\.\)$'):
        toy_runner(tmp_path, model=Probe(), load_from=path, **EVALUATE).test()


@pytest.mark.parametrize('form', ['pth', 'dcp', 'safetensors'])
def test_parts_are_loaded_from_every_form(tmp_path, form):
    state = pretrained(tmp_path / 'a.pth', 'net')
    if form != 'pth':
        convert(tmp_path / 'a.pth', tmp_path / f'a.{form}')
    asked = dict(path=str(tmp_path / f'a.{form}'), part='net', into='backbone')
    runner = load(tmp_path, asked)
    assert torch.equal(params(runner)['backbone.3.weight'], state['net.3.weight'])


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    toy_runner(folder, train_cfg=dict(by_epoch=True, max_epochs=1)).train()
    with torch.serialization.safe_globals([]):
        return torch.load(folder / 'epoch_1.pth', weights_only=False)


@pytest.mark.fault(
    '`--resume` from a checkpoint without its optimiser, schedules or place, or with other weights',
    'refused, with what is missing or surplus',
)
@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (lambda c: c.pop('optimizer'), 'it has no optimizer; load_from without resume'),
        (lambda c: c.pop('param_schedulers'), 'it has no param_schedulers'),
        (lambda c: c.pop('message_hub'), 'it has no message_hub'),
        (lambda c: c['meta'].pop('iter'), 'it has no meta.iter'),
        (lambda c: c['state_dict'].pop('net.0.bias'), r'1 missing \(net.0.bias\)$'),
        (lambda c: c['state_dict'].update(new=torch.ones(1)), r'does not have \(new\)$'),
        (
            lambda c: c['state_dict'].update({'net.0.bias': torch.ones(3)}),
            r'bias \(3,\) for \(8,\)',
        ),
    ],
)
def test_only_all_of_a_run_is_resumed_from(tmp_path, whole, change, said):
    part = {**whole, 'meta': dict(whole['meta']), 'state_dict': dict(whole['state_dict'])}
    change(part)
    torch.save(part, tmp_path / 'part.pth')
    with pytest.raises(CheckpointError, match=said):
        toy_runner(tmp_path, resume=True, load_from=str(tmp_path / 'part.pth')).train()


def test_a_part_is_not_resumed_from(tmp_path):
    with pytest.raises(ValueError, match='resume=True goes on with all of a checkpoint'):
        load(tmp_path, dict(path='a.pth', part='net'), resume=True)


@pytest.mark.parametrize('entries', [dict(meta=[]), dict(state_dict=[1]), dict(state_dict={1: 2})])
def test_what_is_no_checkpoint_is_refused(tmp_path, entries):
    torch.save({'state_dict': ToyModel().state_dict(), **entries}, tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match='a.pth'):
        load(tmp_path, str(tmp_path / 'a.pth'), model=ToyModel())


def test_weights_alone_are_not_resumed_from(tmp_path):
    save_file(ToyModel().state_dict(), tmp_path / 'a.safetensors')
    with pytest.raises(CheckpointError, match='no message_hub, optimizer, param_schedulers, meta'):
        toy_runner(tmp_path, resume=True, load_from=str(tmp_path / 'a.safetensors')).train()


@pytest.mark.fault(
    'a checkpoint notes a config in `meta`, which MMEngine runs when resuming', 'it is not run'
)
def test_a_config_in_a_checkpoint_is_not_run(tmp_path, whole):
    code = f'import os\nos.mkdir({str(tmp_path / "traces")!r})'
    torch.save({**whole, 'meta': {**whole['meta'], 'config': code}}, tmp_path / 'a.pth')
    losses = Losses()
    toy_runner(tmp_path, losses, resume=True, load_from=str(tmp_path / 'a.pth')).train()
    assert losses.seen[0][0] == 5
    assert not (tmp_path / 'traces').exists()


def test_a_run_is_finetuned_by_its_folder(tmp_path):
    """The newest checkpoint of the run, and the part of it that is asked for."""
    folder = tmp_path / 'dino'
    folder.mkdir()
    state = pretrained(folder / 'epoch_2.pth', 'student.backbone', 'teacher.backbone')
    (folder / 'last_checkpoint').write_text(str(folder / 'epoch_2.pth'))
    load_from = dict(path=str(folder), part='teacher.backbone', into='backbone')
    runner = load(tmp_path, load_from)
    found = runner.model.backbone.state_dict()
    for name, value in found.items():
        torch.testing.assert_close(value, state[f'teacher.backbone.{name}'])
    runner.train()
    changed = runner.model.backbone.state_dict()
    assert any(not torch.equal(changed[name], state[f'teacher.backbone.{name}']) for name in found)
