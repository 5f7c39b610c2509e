"""What a run says on the console, and what it keeps for the log file."""

import errno
import logging
import sys
from io import StringIO
from types import SimpleNamespace

import pytest

from memengine.engine.cli.console import describe_run, set_up_console, to_log_file
from memengine.engine.hooks import progress
from tests.engine.cli.test_main import cli, folder, run_main  # noqa: F401 (fixtures)
from tests.engine.hooks.images import image_runner
from tests.engine.toy import toy_runner

TALKATIVE = ('--cfg-options', 'log_level=INFO')


def said(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_run_begins_in_a_few_lines(folder, capsys):  # noqa: F811
    assert run_main('train', 'config.py', *TALKATIVE) == 0
    lines = said(capsys)
    first = next(i for i, line in enumerate(lines) if 'Epoch(train)' in line)
    assert first <= 15
    start = '\n'.join(lines[:first])
    for known in ('Device: CPU', 'Run: work_dirs/config, seed 1', 'CliModel, 7 parameters, 7 of'):
        assert known in start
    assert 'Data: 16 samples, 4 a step, loaded by the main process' in start
    assert 'Training: 2 epochs, 8 iterations by SGD, lr 0.0001, float32' in start
    for noise in ('nccl', 'GPU number', 'Hooks will be', 'mmengine - INFO'):
        assert noise not in start
    assert not any('Exp name' in line for line in lines)
    (log,) = folder.rglob('*.log')
    assert str(log.relative_to(folder)) in start
    text = log.read_text()
    assert "type='CliModel'" in text and 'Hooks will be executed' in text and 'PyTorch' in text


def test_without_autocast_the_precision_is_that_of_the_weights(tmp_path):
    runner = toy_runner(tmp_path)
    runner.model.double()
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    assert list(describe_run(runner))[-1].endswith(', float64')


def test_quiet_says_nothing_and_verbose_all(folder, capsys):  # noqa: F811
    assert run_main('train', 'config.py', '--quiet', *TALKATIVE) == 0
    assert said(capsys) == []
    assert 'Epoch(train)' in next(folder.rglob('*.log')).read_text()
    assert run_main('train', 'config.py', '--verbose', '--work-dir', 'b', *TALKATIVE) == 0
    out = '\n'.join(said(capsys))
    assert "type='CliModel'" in out and 'Hooks will be executed' in out
    with pytest.raises(SystemExit):
        run_main('train', 'config.py', '--quiet', '--verbose')


@pytest.mark.parametrize('isatty', [True, False])
def test_warnings_are_named_and_coloured_on_a_terminal(isatty):
    stream = StringIO()
    stream.isatty = lambda: isatty
    logger = logging.Logger('test')
    logger.addHandler(logging.StreamHandler(stream))
    set_up_console(logger, 'normal')
    logger.info('all is %s', 'well')
    logger.warning('a warning')
    first, second = stream.getvalue().splitlines()
    assert first.endswith('  all is well')
    assert second.endswith('a warning') and ('\x1b[33mWARNING:' in second) is isatty
    assert 'WARNING' in second


def test_without_a_command_it_says_what_there_is(capsys):
    assert run_main() == 0
    out = capsys.readouterr().out
    for command in ('train', 'test', 'convert', 'techniques', 'first steps'):
        assert command in out


def test_the_shell_completes_a_line(monkeypatch):
    seen = []
    monkeypatch.setenv('_ARGCOMPLETE', '1')
    monkeypatch.setitem(sys.modules, 'argcomplete', SimpleNamespace(autocomplete=seen.append))
    run_main()
    assert seen[0].prog == 'memengine'


def test_curves_go_to_tensorboard_by_one_word(folder, cli):  # noqa: F811
    pytest.importorskip('tensorboard')
    assert cli('train', 'config.py', '--track', 'tensorboard') == (0, '')
    assert list(folder.rglob('events.out.tfevents.*')) and list(folder.rglob('scalars.json'))


@pytest.mark.parametrize('name', ['wandb', 'mlflow'])
def test_a_tracker_is_added_or_named_as_missing(folder, cli, monkeypatch, name):  # noqa: F811
    from memengine.engine.cli import tracking
    from memengine.engine.config.check import check_config
    from memengine.engine.config.file import load_config

    monkeypatch.setattr(tracking.importlib.util, 'find_spec', lambda name: None)
    status, error = cli('train', 'config.py', '--track', name)
    assert status == 1 and f'pip install {name}' in error
    monkeypatch.setattr(tracking.importlib.util, 'find_spec', lambda name: 'there')
    monkeypatch.delenv('WANDB_MODE', raising=False)
    cfg = load_config('config.py')
    cfg.work_dir = 'work_dirs/config'
    tracking.track(cfg, [name, name])
    check_config(cfg)
    local, other = cfg.visualizer.vis_backends
    assert local['type'] == 'LocalVisBackend' and other['type'].lower().startswith(name)
    assert name != 'wandb' or other.init_kwargs.mode == 'offline'


def test_quiet_shows_no_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, '_terminal', lambda: pytest.fail('asked for a terminal'))
    image_runner(tmp_path, dict(type='ProgressHook'), cfg=dict(console='quiet')).train()


@pytest.mark.parametrize('has_widgets', [True, False])
def test_a_notebook_shows_a_bar_where_it_can(monkeypatch, has_widgets):
    notebook = SimpleNamespace(is_jupyter=True, is_dumb_terminal=False)
    monkeypatch.setattr(progress, 'Console', lambda: notebook)
    monkeypatch.setattr(progress.importlib.util, 'find_spec', lambda name: has_widgets or None)
    assert (progress._terminal() is notebook) is has_widgets


class Full(StringIO):
    """A file on a disk without room."""

    def write(self, text):
        raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.fault('The disk is full when the log is written', 'said once; training goes on')
def test_a_log_file_on_a_full_disk_is_said_once(tmp_path, capsys):
    logger = logging.Logger('run', logging.INFO)
    file = logging.FileHandler(tmp_path / 'run.log')
    file.setStream(Full())
    logger.addHandler(file)
    set_up_console(logger, 'normal')
    for _ in range(3):
        logger.info('a line')
    assert to_log_file(logger, 'a traceback') is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('memengine: warning: the log file ')
    assert line.endswith('run.log lacks what follows: [Errno 28] No space left on device')


def test_a_log_file_that_has_a_text_is_named(tmp_path):
    logger = logging.Logger('run', logging.INFO)
    logger.addHandler(logging.FileHandler(tmp_path / 'run.log'))
    set_up_console(logger, 'normal')
    assert to_log_file(logger, 'a traceback') == tmp_path / 'run.log'
    assert 'a traceback' in (tmp_path / 'run.log').read_text()
