"""Whatever a checkpoint's pickles want to run is not run, on any way in."""

import contextlib
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from memengine.engine.checkpoint.convert import convert
from memengine.engine.checkpoint.files import CheckpointError
from memengine.engine.checkpoint.sharded import read_sharded
from tests.engine import malice
from tests.engine.toy import Losses, ToyData, ToyModel, toy_runner


def load(path):
    toy_runner(path.parent / 'run', load_from=str(path)).train()


def resume(path):
    toy_runner(path.parent / 'run', load_from=str(path), resume=True).train()


def evaluate(path):
    loader = dict(dataset=ToyData(), sampler=dict(type='DefaultSampler', shuffle=False))
    options = dict(test_dataloader=loader, test_cfg=dict(), test_evaluator=dict(type='DumpResults'))
    options['test_evaluator']['out_file_path'] = str(path.parent / 'results.pkl')
    toy_runner(path.parent / 'run', load_from=str(path), **options).test()


def turn(path):
    convert(path, path.parent / 'turned.pth')


WAYS = (turn, load, resume, evaluate)


@pytest.fixture(autouse=True)
def _torch_is_told_to_trust(monkeypatch):
    """As people tell it for other programs."""
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')


@pytest.mark.fault(
    'a checkpoint of any form with code in its pickles is converted, tested, resumed or loaded',
    'the code is not run; the file and what it wanted are named',
)
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('make', malice.FILES)
def test_a_file_runs_nothing(tmp_path, make, way):
    traces, file = tmp_path / 'traces', tmp_path / 'gift.pth'
    make(malice.Attack(traces), file)
    with pytest.raises(CheckpointError, match='gift.pth'):
        way(file)
    assert not traces.exists()


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('make', malice.FOLDERS)
def test_a_folder_runs_nothing(tmp_path, make, way):
    traces, folder = tmp_path / 'traces', tmp_path / 'gift.dcp'
    malice.write_sharded(folder)
    make(malice.Attack(traces), folder)
    if make is malice.metadata_of_a_rank:  # a file that nobody opens
        assert read_sharded(folder)['state_dict']['x'].sum() == 2
        return
    with pytest.raises(CheckpointError, match='gift.dcp'):
        way(folder)
    assert not traces.exists()


@pytest.mark.fault('a pipe in place of a checkpoint', 'refused; no waiting')
@pytest.mark.parametrize('name', ['gift.pth', 'gift.safetensors'])
@pytest.mark.parametrize('way', [load, turn])
def test_a_pipe_is_not_waited_for(tmp_path, name, way):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileNotFoundError, match='gift'):
        way(tmp_path / name)


class Pretrained(ToyModel):
    """The toy model, which MMEngine reads a file for."""

    def __init__(self, file):
        super().__init__()
        self.init_cfg = dict(type='Pretrained', checkpoint=str(file))


@pytest.mark.parametrize('make', malice.FILES)
def test_a_file_of_init_cfg_runs_nothing(tmp_path, make):
    make(malice.Attack(tmp_path / 'traces'), tmp_path / 'gift.pth')
    with pytest.raises(CheckpointError, match='A checkpoint of init_cfg'):
        toy_runner(tmp_path / 'run', model=Pretrained(tmp_path / 'gift.pth')).train()
    assert not (tmp_path / 'traces').exists()


@pytest.mark.fault(
    'a work dir with configs, logs and caches that others wrote is resumed in', 'none is read'
)
def test_nothing_but_checkpoints_of_a_work_dir_is_read(tmp_path):
    work_dir, losses = tmp_path / 'run', Losses()
    toy_runner(work_dir, train_cfg=dict(by_epoch=True, max_epochs=1)).train()
    code = f'import os\nos.mkdir({str(tmp_path / "traces")!r})'
    for name in ('toy.py', 'config.py', 'vis_data/config.py', 'sitecustomize.py', 'torch.py'):
        (work_dir / name).parent.mkdir(exist_ok=True)
        (work_dir / name).write_text(code)
    malice.bare_pickle(malice.Attack(tmp_path / 'traces'), work_dir / 'cache.pkl')
    toy_runner(work_dir, losses, resume=True).train()
    assert losses.seen[0][0] == 5
    assert not (tmp_path / 'traces').exists()


@pytest.mark.fault(
    '`last_checkpoint` of a work dir names a file elsewhere, or one to be fetched from the web',
    'the former is said, and read as safely as any; the latter is refused',
)
def test_a_work_dir_leads_elsewhere_in_the_open_only(tmp_path, monkeypatch):
    gift, work_dir, said = tmp_path / 'gift.pth', tmp_path / 'run', []
    malice.torch_file(malice.Attack(tmp_path / 'traces'), gift)
    work_dir.mkdir()
    (work_dir / 'last_checkpoint').write_text(str(gift))
    monkeypatch.setattr('logging.Logger.warning', lambda self, text, *args: said.append(text))
    with pytest.raises(CheckpointError, match='gift.pth wants to run'):
        toy_runner(work_dir, resume=True).train()
    assert any(text.endswith(f'leads out of the work dir, to {gift}') for text in said), said
    for scheme in ('https', 'torchvision'):
        (work_dir / 'last_checkpoint').write_text(f'{scheme}://example.invalid/a.pth')
        with pytest.raises(CheckpointError, match='where no run saves'):
            toy_runner(work_dir, resume=True).train()
    assert not (tmp_path / 'traces').exists()


def runs(tmp_path, read):
    """Whether the attack is one: read carelessly, it runs, and what it leaves is no checkpoint."""
    with contextlib.suppress(Exception, CheckpointException):
        read()
    return (tmp_path / 'traces').exists()


@pytest.mark.parametrize('make', malice.FILES)
def test_the_files_are_not_harmless(tmp_path, make):
    make(malice.Attack(tmp_path / 'traces'), tmp_path / 'gift.pth')
    assert runs(tmp_path, lambda: torch.load(tmp_path / 'gift.pth', weights_only=False))


@pytest.mark.parametrize('make', malice.FOLDERS[:3])
def test_the_folders_are_not_harmless(tmp_path, make):
    malice.write_sharded(tmp_path / 'gift.dcp')
    make(malice.Attack(tmp_path / 'traces'), tmp_path / 'gift.dcp')
    reader = dcp.FileSystemReader(tmp_path / 'gift.dcp')
    state = {'state_dict/x': torch.zeros(2)}
    assert runs(tmp_path, lambda: dcp.load(state, storage_reader=reader))
