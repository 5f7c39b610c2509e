"""A config that a run wrote into its work dir starts the same run again."""

import os
import subprocess
import sys

import pytest
import torch

from memengine.engine import Runner
from memengine.engine.config.file import load_config
from memengine.testing import run_ranks
from tests.test_configs import CONFIGS, ROOT, shrink

# Each file is checked in a process of its own, whose registries nothing has been imported into;
# what they import from other packages is there already, so that it takes no time.
CHECK_EACH_ALONE = """
import gc, os, sys
import timm, torchvision.transforms.v2, sklearn.datasets, mmengine.runner
from memengine.engine.config.check import check_config
from memengine.engine.config.file import load_config

assert not {'memengine.datasets', 'memengine.models'} & set(sys.modules)
failed = 0
gc.freeze()  # the collector would copy all that is there into each process
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            check_config(load_config(path))
            os._exit(0)
        except BaseException as error:
            print(f'{path}: {error!r}', flush=True)
            os._exit(1)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(failed > 0)
"""


def types_in(node):
    """All types that a config names."""
    nested = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = {str(node['type'])} if isinstance(node, dict) and 'type' in node else set()
    return own.union(*map(types_in, nested))


def test_a_written_config_is_checked_whatever_was_imported_before(tmp_path):
    files, seen = [], set()
    for name in CONFIGS:
        cfg = load_config(ROOT / name)
        if types_in(cfg.to_dict()) <= seen:
            continue
        seen |= types_in(cfg.to_dict())
        cfg.merge_from_dict(dict(work_dir='x', launcher='none', default_scope='memengine'))
        files.append(str(tmp_path / name.replace('/', '_')))
        cfg.dump(files[-1])
    command = [sys.executable, '-c', CHECK_EACH_ALONE, *files]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def run_of(file, work_dir, world_size=1, seed=3):
    """The state of a shrunken run, and the config that it wrote."""
    cfg = load_config(file)
    if cfg.get('work_dir') is None:  # as shipped
        cfg = shrink(cfg)
        cfg.train_dataloader.batch_size, cfg.train_dataloader.dataset.indices = 4, 24
        cfg.launcher = 'pytorch' if world_size > 1 else 'none'
        cfg.randomness = dict(seed=seed)
    cfg.work_dir = str(work_dir)
    cfg.experiment_name = work_dir.name
    runner = Runner.from_cfg(cfg)
    runner.train()
    (written,) = work_dir.glob('*.py')
    return runner.model.state_dict(), written


@pytest.mark.parametrize(('name', 'seed'), [('classify_vit', None), ('dino_vit', 3)])
def test_a_run_from_a_written_config_takes_the_same_steps(name, seed, tmp_path, undrawn):
    state, written = run_of(ROOT / f'configs/{name}.py', tmp_path / f'first_{name}', seed=seed)
    again, _ = run_of(written, tmp_path / f'again_{name}')
    assert state.keys() == again.keys()
    assert all(torch.equal(state[key], again[key]) for key in state)


def _run_twice(rank, world_size, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    state, written = run_of(ROOT / 'configs/dino_vit.py', folder / 'first_of_ranks', world_size)
    again, _ = run_of(written, folder / 'again_of_ranks', world_size)
    return state, again


@pytest.mark.slow
def test_batchnorm_over_ranks_is_in_the_written_config(tmp_path):
    for state, again in run_ranks(2, _run_twice, tmp_path):
        assert any('running_mean' in key for key in state)
        assert state.keys() == again.keys()
        assert all(torch.equal(state[key], again[key]) for key in state)
