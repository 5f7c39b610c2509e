"""GPU tests say why they do not run, and tests that start ranks are slow ones.

Slow ones may take long on a machine that is busy.

One thread for each of the processes that share the cores. The process that hands out the tests to
them imports no torch.
"""

import atexit
import functools
import gc
import importlib
import os
import pkgutil
import signal
import sys
import types

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch is imported

import pytest


def pytest_configure(config):
    """Import yapf, which MMEngine imports, before several processes do so at a time.

    At the first time after it was installed it writes a file that another may read half written.
    """
    if not hasattr(config, 'workerinput'):
        importlib.import_module('yapf')


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        starts_ranks = 'run_ranks' in item.function.__code__.co_names
        if starts_ranks:  # each imports torch anew
            item.add_marker(pytest.mark.slow)
        if starts_ranks or 'slow' in item.keywords:
            item.add_marker(pytest.mark.timeout(1200))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason='needs a CUDA device, and this machine has none')
    for item in items:
        if 'gpu' in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_scope_is_left():
    """A Runner sets the scope in which MMEngine looks up names, for all that comes after it."""
    yield
    scopes = sys.modules.get('mmengine.registry.default_scope')
    if scopes is not None:
        scopes.DefaultScope._instance_dict.clear()


def pytest_collection_finish():
    gc.freeze()  # modules stay: collecting need not look through them each time
    gc.set_threshold(*gc.get_threshold()[:2], 100)  # what is in cycles, a few MiB, may wait
    atexit.register(gc.unfreeze)  # at the end it counts what is left


@pytest.fixture(autouse=True, scope='session')
def _signals_mean_what_they_do_at_a_terminal():
    """Under nohup a closed terminal's signal is ignored, by runs that tests start as well."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.fixture(autouse=True, scope='session')
def _torch_keeps_no_accounts():
    """Without a GPU each seed is put by with three stacks, to be shown if starting one fails; and
    each compilation times its guards, with the caches flushed."""
    torch, guards = sys.modules.get('torch'), sys.modules.get('torch._dynamo.guards')
    with pytest.MonkeyPatch.context() as patch:
        if torch is not None:
            for device in (torch.cuda, torch.mtia, torch.xpu):
                patch.setattr(
                    device, 'traceback', types.SimpleNamespace(format_stack=list), raising=False
                )
        if guards is not None:
            patch.setattr(guards, 'profile_guard_manager', lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope='session')
def _what_each_run_repeats_is_done_once():
    """Asking compiler and git for versions and making figures that nobody draws in take MMEngine
    longer, whenever a run starts, than a test's few iterations."""
    with pytest.MonkeyPatch.context() as patch:
        for name, changed in (
            ('mmengine.hooks.runtime_info_hook.get_git_hash', functools.cache),
            ('mmengine.runner.runner.collect_env', functools.cache),
            ('mmengine.visualization.visualizer.Visualizer._initialize_fig', _of_the_first_call),
        ):
            if 'mmengine.runner' in sys.modules:  # imported by a test that is to run
                patch.setattr(name, changed(pkgutil.resolve_name(name)))
        yield


def _of_the_first_call(make):
    made = []

    def shared(*args):
        made[:] = made or [make(*args)]
        return made[0]

    return shared


@pytest.fixture
def log_level_stays():
    """What plans or measures runs makes MMEngine's log quieter."""
    from mmengine.logging import MMLogger

    logger = MMLogger.get_current_instance()
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made as ever; their files hold nothing, as drawing takes a second for each."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, 'savefig', lambda self, path, **options: path.touch())


@pytest.fixture
def techniques_of_its_own(monkeypatch):
    """What a test makes known, by a module that registers it, is unknown after it."""
    from memengine.registry import HOOKS
    from memengine.technique import techniques

    monkeypatch.setattr('memengine.technique.description._known', techniques())
    monkeypatch.setattr(HOOKS, '_module_dict', dict(HOOKS.module_dict))


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """As on a machine that has one: a model on the CPU is still trained there."""
    import torch

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)


@pytest.fixture
def fresh_memory_is_nan():
    """What is read before it is filled is no number, in place of whatever lies there."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
