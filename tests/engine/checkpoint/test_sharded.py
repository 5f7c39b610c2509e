"""Sharded checkpoints in one process: what they hold, how they are written, read and converted."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mmengine.optim import OptimWrapperDict
from safetensors.torch import load_file, save_file

from memengine.engine.checkpoint import sharded_saving
from memengine.engine.checkpoint.convert import convert
from memengine.engine.checkpoint.files import CheckpointError
from memengine.engine.checkpoint.latest import find_latest
from memengine.engine.checkpoint.sharded import read_sharded
from memengine.engine.checkpoint.sharded_saving import sharded_write
from memengine.engine.checkpoint.state import key_by_index, key_by_name
from memengine.engine.optim import OptimWrapper
from tests.engine.toy import Losses, params, toy_runner

SHARDED = dict(checkpoint=dict(interval=1, sharded=True))
BACKGROUND = dict(checkpoint=dict(interval=1, sharded=True, asynchronous=True))


def trained(tmp_path, hooks=SHARDED, **kwargs):
    losses = Losses()
    runner = toy_runner(tmp_path, losses, default_hooks=hooks, **kwargs)
    runner.train()
    return runner, losses.seen


def checkpoints(folder):
    return sorted(path.name for path in folder.glob('*.dcp')), sorted(folder.glob('*.pth'))


@pytest.mark.parametrize('hooks', [SHARDED, BACKGROUND], ids=['foreground', 'background'])
def test_a_run_resumed_from_a_sharded_checkpoint_is_the_one_that_did_not_stop(tmp_path, hooks):
    whole, seen = trained(tmp_path / 'whole', {})
    stop = dict(by_epoch=True, max_epochs=3, stop_at_iter=7)
    _, first = trained(tmp_path / 'parts', hooks, train_cfg=stop)
    assert checkpoints(tmp_path / 'parts') == (['epoch_1.dcp', 'iter_7.dcp'], [])
    assert (tmp_path / 'parts' / 'last_checkpoint').read_text().endswith('iter_7.dcp')
    resumed, second = trained(tmp_path / 'parts', hooks, resume=True)
    assert first + second == seen
    for name, value in params(resumed).items():
        assert torch.equal(value, params(whole)[name]), name
    names = ['epoch_1.dcp', 'epoch_2.dcp', 'epoch_3.dcp', 'iter_7.dcp']
    assert checkpoints(tmp_path / 'parts') == (names, [])
    assert not list((tmp_path / 'parts').glob('.*')), 'nothing half done is left'


def test_the_optimiser_goes_by_the_names_of_parameters(tmp_path):
    runner, _ = trained(tmp_path)
    optimizer = read_sharded(tmp_path / 'epoch_3.dcp')['optimizer']
    momentum = runner.optim_wrapper.optimizer.state[runner.model.net[3].bias]['exp_avg']
    assert torch.equal(optimizer['state']['net.3.bias']['exp_avg'], momentum)


def test_several_optimisers_go_by_names_too():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    wrappers = OptimWrapperDict(
        **{
            f'w{i}': OptimWrapper(torch.optim.Adam(layer.parameters()))
            for i, layer in enumerate(model)
        }
    )
    model(torch.ones(1, 2)).sum().backward()
    for wrapper in wrappers.values():
        wrapper.step()
    named = key_by_name(wrappers.state_dict(), model, wrappers)
    assert [*named['w1']['state']] == ['1.weight', '1.bias']
    assert key_by_index(named) == wrappers.state_dict()


def test_in_the_background_the_state_of_the_moment_is_written(tmp_path, monkeypatch):
    """Training goes on while the checkpoint of its first epoch waits to be written."""
    import threading

    trained(tmp_path / 'plain')
    go, real = threading.Event(), dcp.save

    def slow(*args, **kwargs):
        assert go.wait(60)
        return real(*args, **kwargs)

    class Release(Losses):
        def after_train_iter(self, runner, *args, **kwargs):
            if runner.iter == 8:
                assert find_latest(runner.work_dir) is None, 'it is still being written'
                go.set()

    monkeypatch.setattr(dcp, 'save', slow)
    trained(tmp_path / 'background', BACKGROUND, custom_hooks=[Release()])
    plain, background = (
        read_sharded(tmp_path / kind / 'epoch_1.dcp') for kind in ('plain', 'background')
    )
    for name, value in plain['state_dict'].items():
        assert torch.equal(value, background['state_dict'][name]), name


@pytest.mark.fault('killed while a sharded checkpoint is replaced', 'the one before is whole')
def test_a_killed_replacement_leaves_what_was_there(tmp_path, monkeypatch):
    folder = tmp_path / 'a.dcp'
    (tmp_path / 'last_checkpoint').write_text(str(folder))
    sharded_write(folder, dict(state_dict=dict(x=torch.zeros(2))))()
    real = sharded_saving.os.replace

    def killed_in_between(source, target):
        if str(source).endswith('.partial'):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(sharded_saving.os, 'replace', killed_in_between)
    with pytest.raises(KeyboardInterrupt):
        sharded_write(folder, dict(state_dict=dict(x=torch.ones(2))))()
    assert read_sharded(find_latest(tmp_path))['state_dict']['x'].sum() == 0
    monkeypatch.setattr(sharded_saving.os, 'replace', real)
    sharded_write(folder, dict(state_dict=dict(x=torch.ones(2))))()
    assert read_sharded(find_latest(tmp_path))['state_dict']['x'].sum() == 2
    assert {p.name for p in tmp_path.iterdir()} == {'a.dcp', 'last_checkpoint'}


def test_last_checkpoint_is_found_after_the_work_dir_moved(tmp_path):
    trained(tmp_path / 'old')
    (tmp_path / 'old').rename(tmp_path / 'new')
    assert find_latest(tmp_path / 'new') == tmp_path / 'new' / 'epoch_3.dcp'


def test_a_sharded_checkpoint_that_is_not_whole_says_so(tmp_path):
    trained(tmp_path)
    folder = tmp_path / 'epoch_1.dcp'
    for part, said in (('__0_0.distcp', 'damaged or incomplete'), ('.metadata', 'not a whole one')):
        (folder / part).unlink()
        with pytest.raises(CheckpointError, match=said):
            read_sharded(folder)


class Attack:
    def __reduce__(self):
        return print, ('this must not run',)


def test_nothing_runs_while_a_sharded_checkpoint_is_read(tmp_path, capsys):
    trained(tmp_path)
    folder = tmp_path / 'epoch_1.dcp'
    metadata = (folder / '.metadata').read_bytes()
    (folder / '.metadata').write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match="wants to run 'builtins.print'"):
        read_sharded(folder)
    (folder / '.metadata').write_bytes(metadata)
    torch.save(Attack(), folder / 'run.pth')
    with pytest.raises(CheckpointError, match='print'):
        read_sharded(folder)
    assert 'must not' not in capsys.readouterr().out


def test_weights_are_loaded_from_every_kind_of_checkpoint(tmp_path):
    runner, _ = trained(tmp_path / 'run')
    source = tmp_path / 'run' / 'epoch_3.dcp'
    convert(source, tmp_path / 'a.safetensors')
    convert(source, tmp_path / 'a.pth')
    for path in (source, tmp_path / 'a.safetensors', tmp_path / 'a.pth'):
        other = toy_runner(tmp_path / 'other')
        other.load_checkpoint(str(path))
        for name, value in params(runner).items():
            assert torch.equal(params(other)[name], value), (path, name)
        assert not other.optim_wrapper['optimizer'].get('state'), 'weights only'


def test_training_goes_on_from_a_converted_checkpoint(tmp_path):
    _, seen = trained(tmp_path / 'whole')
    source = tmp_path / 'whole' / 'epoch_2.dcp'
    said = convert(source, tmp_path / 'one.pth')
    assert said.endswith('one.pth: 9 tensor(s) of weights, and the optimiser')
    convert(tmp_path / 'one.pth', tmp_path / 'again.dcp')
    for path in ('one.pth', 'again.dcp'):
        _, rest = trained(tmp_path / path[:3], resume=True, load_from=str(tmp_path / path))
        assert rest == seen[10:]


def test_safetensors_and_back_keeps_weights_and_where_they_are_from(tmp_path):
    runner, _ = trained(tmp_path / 'run')
    convert(tmp_path / 'run' / 'epoch_3.dcp', tmp_path / 'a.safetensors')
    assert load_file(tmp_path / 'a.safetensors').keys() == params(runner).keys()
    convert(tmp_path / 'a.safetensors', tmp_path / 'b.dcp')
    back = read_sharded(tmp_path / 'b.dcp')
    assert back['meta']['iter'] == '15'
    for name, value in params(runner).items():
        assert torch.equal(back['state_dict'][name], value)


def test_tied_weights_are_converted(tmp_path):
    weight = torch.randn(3, 3)
    torch.save(dict(state_dict=dict(a=weight, b=weight, c=weight.t())), tmp_path / 'a.pth')
    convert(tmp_path / 'a.pth', tmp_path / 'a.safetensors')
    state = load_file(tmp_path / 'a.safetensors')
    assert torch.equal(state['a'], weight) and torch.equal(state['c'], weight.t())


def test_what_cannot_be_converted_is_said(tmp_path):
    save_file({'x': torch.ones(1)}, tmp_path / 'a.safetensors')
    for source, target, said in (
        ('none.pth', 'b.dcp', 'SOURCE: there is no checkpoint'),
        ('a.safetensors', 'b.ckpt', r'must end in .safetensors'),
        ('a.safetensors', 'a.safetensors', 'there is .* already'),
    ):
        with pytest.raises(CheckpointError, match=said):
            convert(tmp_path / source, tmp_path / target)


def test_steps_of_another_size_are_refused_when_resuming_only(tmp_path):
    trained(tmp_path)
    halves = dict(loader=dict(batch_size=2), resume=True)
    with pytest.raises(ValueError, match=r'steps of 4.*make steps of 2: set .*batch_size=4'):
        trained(tmp_path, **halves)
    trained(tmp_path, loader=dict(batch_size=2), load_from=str(tmp_path / 'epoch_3.dcp'))


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    keys = dict(sharded=True, published_keys=['state_dict'])
    with pytest.raises(ValueError, match='memengine convert'):
        toy_runner(tmp_path, default_hooks=dict(checkpoint=keys))
    with pytest.raises(TypeError, match="no setting 'shraded'.*did you mean 'sharded'"):
        toy_runner(tmp_path, default_hooks=dict(checkpoint=dict(shraded=True)))


def test_published_keys_make_a_smaller_file(tmp_path):
    trained(tmp_path, dict(checkpoint=dict(published_keys=['state_dict', 'meta'])))
    (published,) = tmp_path.glob('epoch_3-*.pth')
    assert published.stat().st_size < (tmp_path / 'epoch_3.pth').stat().st_size
