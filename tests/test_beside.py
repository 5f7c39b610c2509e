"""Other people's loops and trainers with two or three lines changed: same step, fewer bytes."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.docs_pages import ROOT

PEERS = dict(
    accelerate_loop='accelerate',
    lightly_loop='lightly',
    lightly_train_command='lightly_train',
    lightning_gradient_cache='lightning',
    **{f'lightning_gradient_cache {ranks}': 'lightning' for ranks in ('ddp', 'fsdp2')},
    lightning_module='lightning',
    mmdet_config='mmdet',
    mmengine_runner='mmengine',
    mmpretrain_config='mmpretrain',
    open_clip_loop='open_clip',
    sentence_transformers_trainer='sentence_transformers',
    stable_pretraining_module='stable_pretraining',
    transformers_trainer='accelerate',  # which its Trainer needs
)


def run(name):
    """What a script prints, in a process of its own: some peers change things for all of one."""
    script, *arguments = name.split()
    done = subprocess.run(
        [sys.executable, ROOT / f'examples/beside/{script}.py', *arguments],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def held(line):
    return [float(mib) for mib in re.findall(r'([\d.]+) MiB', line)]


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(PEERS))
def test_same_step_in_fewer_bytes(name):
    if find_spec(PEERS[name]) is None:
        pytest.skip(f'{PEERS[name]} is not installed: pip install -r requirements/peers.txt')
    lines = run(name).splitlines()
    plain, less = held(next(line for line in lines if line.startswith('saved: ')))
    assert less < (0.9 if name == 'mmdet_config' else 0.75) * plain  # whose head keeps most
    if small := [held(line)[0] for line in lines if line.startswith('8 samples')]:
        assert less <= small[0] < plain  # 64 samples in the bytes of 8
        losses = re.findall(r'\d+\.\d{5}', next(x for x in lines if x.startswith('loss ')))
        expected, found = losses[:3], losses[3:]
        assert [float(x) for x in found] == pytest.approx([float(x) for x in expected], abs=2e-5)
    elif name != 'lightly_train_command':  # whose augmentations follow no seed of torch's
        assert 'same weights: True' in lines


def test_every_script_is_tried():
    scripts = sorted((ROOT / 'examples/beside').glob('*.py'))
    assert {path.stem for path in scripts} == {name.split()[0] for name in PEERS}
    for path in scripts:
        numbered = re.findall(r'# (?:(\d)(?: and (\d))?:|the line that is new)', path.read_text())
        assert 1 <= len(numbered) <= 3, f'{path.name}: at most three lines change'
        assert len(path.read_text().splitlines()) <= 72
