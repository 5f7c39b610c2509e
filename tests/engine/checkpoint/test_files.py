"""Checkpoints are read safely and written whole."""

import collections
import dataclasses
import datetime
import enum
import shutil
from typing import NamedTuple

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from memengine.engine.checkpoint.files import CheckpointError, atomic_write, safe_loading
from tests.engine.toy import Losses, toy_runner


class Harmless:
    """Something that a checkpoint of weights does not need."""


def load(path, **kwargs):
    with safe_loading(path, **kwargs):
        return torch.load(path)


def test_what_mmengine_stores_is_read(tmp_path):
    buffer = HistoryBuffer([1.0, 2.0], [1, 1])
    state = dict(
        buffer=buffer,
        scalars=[np.float32(1.5), np.int64(3), np.bool_(True)],
        arrays=[np.arange(3), np.ones(2, np.float16), np.array(['a', 'b'])],
        ordered=collections.OrderedDict(a=1),
    )
    torch.save(state, tmp_path / 'a.pth')
    read = load(tmp_path / 'a.pth')
    assert read['buffer'].mean() == buffer.mean() == 1.5
    assert read['scalars'] == state['scalars']
    assert all(np.array_equal(a, b) for a, b in zip(read['arrays'], state['arrays'], strict=True))


def test_what_else_is_refused_by_name_until_trusted(tmp_path):
    torch.save(Harmless(), tmp_path / 'a.pth')
    name = f'{__name__}.Harmless'
    with pytest.raises(CheckpointError, match=rf"trusted_globals=\['{name}'\]"):
        load(tmp_path / 'a.pth')
    assert isinstance(load(tmp_path / 'a.pth', trusted=[name]), Harmless)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / 'a.pth')  # trust ends with the call


@pytest.mark.fault('a checkpoint from a URL that would run code', 'refused, nothing is executed')
def test_a_checkpoint_from_a_url_is_read_as_safely(tmp_path, monkeypatch):
    torch.save(Harmless(), tmp_path / 'a.pth')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    runner = toy_runner(tmp_path / 'run')
    monkeypatch.setattr(
        torch.hub,
        'download_url_to_file',
        lambda url, to, *args, **kwargs: shutil.copy(tmp_path / 'a.pth', to),
    )
    with pytest.raises(CheckpointError, match='Harmless'):
        runner.load_checkpoint('https://example.invalid/a.pth')


def test_a_file_that_is_no_checkpoint_says_so_in_short(tmp_path):
    (tmp_path / 'a.pth').write_bytes(b'no checkpoint at all')
    with pytest.raises(CheckpointError, match='not a readable checkpoint') as caught:
        load(tmp_path / 'a.pth')
    assert 'weights_only=False' not in str(caught.value)


class Attack:
    def __reduce__(self):
        return getattr, (HistoryBuffer, 'register_statistics')


def test_getattr_is_allowed_for_log_buffers_only(tmp_path):
    torch.save(Attack(), tmp_path / 'a.pth')
    with pytest.raises(CheckpointError):
        load(tmp_path / 'a.pth')


class Bag(NamedTuple):
    """Data."""

    colour: str


@dataclasses.dataclass(frozen=True)
class Card:
    """Data, too."""

    colour: str


class Colour(enum.Enum):
    """And this."""

    RED = 'red'


class Opens:
    """Does something when it is made."""

    def __init__(self, path):
        path.touch()


class Closes:
    """Does something when it is thrown away."""

    def __del__(self):
        print('closed')


@dataclasses.dataclass
class Counts:
    """Does something after it was made."""

    colour: str

    def __post_init__(self):
        print('counted')


@pytest.mark.parametrize('thing', [Bag('red'), Card('red'), Colour.RED, datetime.date(2026, 1, 1)])
def test_classes_of_data_can_be_trusted(tmp_path, thing):
    torch.save(thing, tmp_path / 'a.pth')
    name = f'{type(thing).__module__}.{type(thing).__name__}'
    with pytest.raises(CheckpointError, match=rf"trusted_globals=\['{name}'\]"):
        load(tmp_path / 'a.pth')
    assert load(tmp_path / 'a.pth', trusted=[name]) == thing


@pytest.mark.fault(
    'a function or a class that acts is named in `trusted_globals`',
    'refused; no message advises to trust such a thing',
)
@pytest.mark.parametrize(
    'name',
    [
        'posix.system',
        'builtins.eval',
        'builtins.getattr',
        'builtins.object',
        'functools.partial',
        'subprocess.Popen',
        '_io.FileIO',
        *(f'{__name__}.{cls.__name__}' for cls in (Opens, Closes, Counts)),
    ],
)
def test_what_acts_can_not_be_trusted(tmp_path, name):
    module, _, attribute = name.rpartition('.')
    with pytest.raises(ValueError, match=f"trusted_globals: '{name}' is no class that only holds"):
        load(tmp_path / 'a.pth', trusted=[name])
    (tmp_path / 'a.pth').write_bytes(f'c{module}\n{attribute}\n(tR.'.encode())
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / 'a.pth')
    assert 'trusted_globals' not in str(caught.value)


def test_unknown_trusted_name_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='no_such_module.Thing'):
        load(tmp_path / 'a.pth', trusted=['no_such_module.Thing'])


def test_a_damaged_file_says_so(tmp_path):
    torch.save({'a': torch.zeros(1000)}, tmp_path / 'a.pth')
    whole = (tmp_path / 'a.pth').read_bytes()
    (tmp_path / 'a.pth').write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match='damaged'):
        load(tmp_path / 'a.pth')
    (tmp_path / 'a.pth').write_bytes(b'')
    with pytest.raises(CheckpointError, match='damaged'):
        load(tmp_path / 'a.pth')


@pytest.mark.fault(
    'writing a checkpoint fails half way', 'the old file stays, the unfinished one is removed'
)
def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / 'last.pth'
    path.write_text('old')
    with pytest.raises(RuntimeError), atomic_write(path) as partial:
        partial.write_text('half')
        raise RuntimeError
    assert path.read_text() == 'old'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.fault(
    '`--resume` from a checkpoint of another model', 'refused, with what does not fit'
)
def test_resume_refuses_a_checkpoint_of_another_model(tmp_path):
    toy_runner(tmp_path).train()
    runner = toy_runner(tmp_path, resume=True)
    runner.model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r'2 missing \(extra'):
        runner.train()


def test_resume_with_nothing_to_resume_starts_from_scratch(tmp_path):
    losses = Losses()
    toy_runner(tmp_path, losses, resume=True).train()
    assert len(losses.seen) == 15


def test_a_checkpoint_of_mmengine_itself_is_loaded(tmp_path):
    """One that MMEngine's own Runner wrote."""
    from mmengine.runner import Runner as MMRunner

    from tests.engine.toy import ToyData, ToyModel

    runner = MMRunner(
        model=ToyModel(),
        work_dir=str(tmp_path / 'theirs'),
        train_dataloader=dict(
            dataset=ToyData(),
            sampler=dict(type='DefaultSampler', shuffle=True),
            batch_size=4,
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        experiment_name='theirs',
        log_level='WARNING',
    )
    runner.train()
    ours = toy_runner(tmp_path / 'ours')
    ours.load_checkpoint(str(tmp_path / 'theirs' / 'epoch_1.pth'), strict=True)
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, runner.model.state_dict()[name])
    shutil.copytree(tmp_path / 'theirs', tmp_path / 'resumed')
    losses = Losses()
    toy_runner(
        tmp_path / 'resumed',
        losses,
        resume=True,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        param_scheduler=None,
    ).train()
    assert losses.seen[0][0] == 6
