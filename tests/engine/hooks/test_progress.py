"""The progress bar, on a terminal that is made of a string."""

import logging
import re
import sys
import threading
from io import StringIO

import pytest
from mmengine.hooks import Hook
from mmengine.runner import Runner as PlainRunner
from rich.console import Console

from memengine.engine import Runner
from memengine.engine.hooks import progress
from tests.engine.hooks.images import Classifier, image_runner

CONTROL = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 200 columns; what it was sent."""
    screen = StringIO()
    monkeypatch.setattr(
        progress, '_terminal', lambda: Console(force_terminal=True, file=screen, width=200)
    )
    return screen


def shown(screen):
    return CONTROL.sub('', screen.getvalue())


def last_bar(screen):
    """The bar's two lines as they stand at the end."""
    lines = [line for line in shown(screen).replace('\r', '\n').splitlines() if line.strip()]
    return lines[-2:]


def log_of(work_dir):
    return next(work_dir.glob('*/*.log')).read_text()


HOOKS = (dict(type='EvaluateFirstHook'), dict(type='MemoryHook'), dict(type='ProgressHook'))


class Speaker(Hook):
    """Says something in the middle of training, in three ways."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 3:
            runner.logger.warning('a warning')
            print('printed')
            print('complained', file=sys.stderr)


def test_what_the_bar_says(tmp_path, terminal):
    image_runner(tmp_path, *HOOKS).train()
    bar, figures = last_bar(terminal)
    assert bar.startswith('epoch 2/2') and '100%' in bar and 'ETA' in bar
    assert re.search(
        r'loss [\d.]+ · lr 1.00e-02 · k-NN [\d.]+ % · [\d,]+ images/s · [\d.]+ MiB saved · '
        r'[\d,]+ MiB resident$',
        figures.strip(),
    )
    assert 'validating' in shown(terminal)


def test_it_is_redrawn_now_and_then(tmp_path, terminal, monkeypatch):
    """A clock that moves a fifth of a second an iteration: every second one is shown."""
    time_s = [0.0]

    class Clock(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            time_s[0] += 0.2

    monkeypatch.setattr(progress.time, 'monotonic', lambda: time_s[0])
    image_runner(tmp_path, dict(type='ProgressHook'), Clock(), epochs=1).train()
    percents = re.findall(r'(\d+)%', shown(terminal))
    assert [p for p in percents if p in ('16', '17', '33', '50', '67', '83')] == ['33', '67']


def test_no_thread_draws_so_that_forked_workers_may_print(tmp_path, terminal):
    names = []

    class Threads(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            names.extend(type(thread).__name__ for thread in threading.enumerate())

    image_runner(tmp_path, *HOOKS, Threads()).train()
    assert names and '_RefreshThread' not in names


def test_iterations_are_counted_where_there_are_no_epochs(tmp_path, terminal):
    image_runner(
        tmp_path,
        dict(type='ProgressHook'),
        train_cfg=dict(by_epoch=False, max_iters=5, val_interval=5),
        log_processor=dict(by_epoch=False),
    ).train()
    assert last_bar(terminal)[0].startswith('iteration 5/5')


def test_lines_go_above_the_bar_and_iterations_to_the_file_only(tmp_path, terminal, capsys):
    image_runner(tmp_path, *HOOKS, Speaker()).train()
    screen, log = shown(terminal), log_of(tmp_path)
    for line in ('a warning', '5-NN top-1: raw pixels', 'Epoch(val) [1][9/9]'):
        assert line in screen and line in log
    assert 'printed' in screen and 'complained' in screen
    assert 'Epoch(train)' not in screen and 'Exp name' not in screen
    assert 'Epoch(train)' in log
    told = capsys.readouterr()
    assert 'a warning' not in told.out + told.err  # once, above the bar
    for line in ('a warning', 'printed', '5-NN top-1'):  # the bar was wiped before each
        raw = terminal.getvalue()
        before = CONTROL.sub('', raw[: raw.index(line)].rsplit('\x1b[2K', 1)[1])
        assert 'epoch' not in before and '%' not in before


@pytest.mark.parametrize('kind', [Runner, PlainRunner])
@pytest.mark.parametrize('error', [None, ZeroDivisionError, KeyboardInterrupt])
def test_the_terminal_is_given_back(tmp_path, terminal, kind, error):
    class Failing(Classifier):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            if mode == 'loss' and error:
                raise error
            return super().forward(inputs, data_samples, mode)

    runner = image_runner(tmp_path, *HOOKS, model=Failing(), runner=kind)
    handlers, root = list(runner.logger.handlers), list(logging.getLogger().handlers)
    streams = sys.stdout, sys.stderr
    if error:
        with pytest.raises(error):
            runner.train()
    else:
        runner.train()
    assert runner.logger.handlers == handlers and logging.getLogger().handlers == root
    assert (sys.stdout, sys.stderr) == streams
    (hook,) = [h for h in runner.hooks if isinstance(h, progress.ProgressHook)]
    assert hook._live is None
    assert terminal.getvalue().count('\x1b[?25l') == terminal.getvalue().count('\x1b[?25h') == 1
    length = len(terminal.getvalue())
    runner.logger.warning('afterwards')
    assert len(terminal.getvalue()) == length  # nobody writes there any more


def test_no_terminal_no_bar(tmp_path, capsys):
    image_runner(tmp_path, *HOOKS).train()
    out = capsys.readouterr().out
    assert 'Epoch(train)' in log_of(tmp_path)
    assert 'ETA' not in out and '\x1b[?25l' not in out


def test_only_the_first_rank_shows_it(tmp_path, terminal, monkeypatch):
    runner = image_runner(tmp_path, *HOOKS)
    monkeypatch.setattr(runner, '_rank', 1)
    runner.train()
    assert terminal.getvalue() == ''


@pytest.mark.parametrize(
    ('isatty', 'term', 'is_one'),
    [(True, 'xterm', True), (True, 'dumb', False), (False, 'xterm', False)],
)
def test_what_counts_as_a_terminal(monkeypatch, isatty, term, is_one):
    stream = StringIO()
    stream.isatty = lambda: isatty
    monkeypatch.setattr(sys, 'stdout', stream)
    monkeypatch.setenv('TERM', term)
    assert (progress._terminal() is not None) is is_one


def test_validation_alone_shows_no_bar(tmp_path, terminal):
    runner = image_runner(tmp_path, dict(type='ProgressHook'))
    runner.val()
    assert terminal.getvalue() == ''
