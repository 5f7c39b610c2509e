"""The commands that people type, run for real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import NEEDS_SHARDING

ROOT = Path(__file__).parents[3]
SMALL = [
    'train_dataloader.num_workers=0',
    'train_dataloader.persistent_workers=False',
    'val_dataloader.num_workers=0',
    'val_dataloader.persistent_workers=False',
]


def run(*words, **env):
    result = subprocess.run(
        [sys.executable, '-m', *map(str, words)],
        cwd=ROOT,
        env={**os.environ, 'OMP_NUM_THREADS': '1', **env},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def scalars(work_dir):
    (path,) = Path(work_dir).glob('*/vis_data/scalars.json')
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(work_dir, *options, ranks=1, config='configs/dino_vit.py'):
    launch = (
        ['torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}'] if ranks > 1 else []
    )
    launcher = ['--launcher', 'pytorch'] if ranks > 1 else []
    script = [*launch, ROOT / 'tools' / 'train.py'] if ranks > 1 else ['memengine', 'train']
    run(*script, config, '--work-dir', work_dir, *launcher, *options)
    return scalars(work_dir)


@pytest.mark.edge(
    'data_parallel',
    'exact',
    'Losses that are means over a rank’s samples, on ranks that hold as many each: they '
    'follow one process',
)
@pytest.mark.slow
def test_two_ranks_follow_one_process(tmp_path):
    """Two ranks of batch 32 do what one process does with batch 64, up to rounding."""
    options = [
        '--max-iters',
        4,
        '--cfg-options',
        *SMALL,
        'default_hooks.logger.interval=1',
        'log_processor.window_size=1',
    ]
    one = train(tmp_path / 'one', *options)
    two = train(tmp_path / 'two', *options, 'train_dataloader.batch_size=32', ranks=2)
    names = ('loss', 'grad_norm', 'teacher_entropy')
    figures = [[[row[n] for n in names] for row in rows if 'loss' in row] for rows in (one, two)]
    assert len(figures[0]) == len(figures[1]) == 4
    # rank 0 logs its own half of the loss, but the norm of the averaged gradient
    for ours, theirs in zip(*figures, strict=True):
        assert theirs[1] == pytest.approx(ours[1], rel=1e-3)
        assert theirs[0] == pytest.approx(ours[0], rel=0.05)
    knn = [[row['knn_top1'] for row in rows if 'knn_top1' in row] for rows in (one, two)]
    assert knn[0][0] == pytest.approx(knn[1][0], abs=1e-3)


@pytest.mark.slow
def test_two_ranks_of_disco_follow_one_process(tmp_path):
    """CLIP on two ranks of batch 64 contrasts what one process does with batch 128."""
    options = [
        '--max-iters',
        6,
        '--cfg-options',
        *SMALL,
        'default_hooks.logger.interval=1',
        'log_processor.window_size=1',
    ]
    half = [*options, 'train_dataloader.batch_size=64']
    disco = 'model_wrapper_cfg.type=DisCoDistributedDataParallel'
    clip = dict(config='configs/clip_vit.py')
    one, two = (
        [[row['loss'], row['grad_norm'], row['logit_scale']] for row in rows if 'loss' in row]
        for rows in (
            train(tmp_path / 'one', *options, **clip),
            train(tmp_path / 'two', *half, disco, ranks=2, **clip),
        )
    )
    assert len(one) == 6
    assert two == [pytest.approx(row, rel=1e-3) for row in one]


@pytest.mark.slow
def test_train_resume_and_test_by_command(tmp_path):
    options = ['--cfg-options', *SMALL, 'default_hooks.logger.interval=1', 'train_cfg.max_epochs=1']
    train(tmp_path, '--max-iters', 3, *options)
    assert (tmp_path / 'last_checkpoint').read_text().endswith('iter_3.pth')
    run(
        'memengine',
        'train',
        'configs/dino_vit.py',
        '--work-dir',
        tmp_path,
        '--resume',
        *options,
    )
    assert (tmp_path / 'epoch_1.pth').exists()
    assert (tmp_path / 'report' / 'curves.png').exists()
    assert (tmp_path / 'report' / 'attention.png').exists()
    loader = [f'test_dataloader.{key}' for key in ('num_workers=0', 'persistent_workers=False')]
    test = ['test', 'configs/dino_vit.py', tmp_path / 'epoch_1.pth']
    out = run(
        'memengine',
        *test,
        '--work-dir',
        tmp_path / 'test',
        '--cfg-options',
        *loader,
    )
    assert '20-NN top-1' in out


@pytest.mark.slow
@NEEDS_SHARDING
def test_a_sharded_step_is_measured_on_two_ranks(tmp_path):
    """And the ranks end without Python's cleanup, in which gloo's threads now and then abort."""
    (tmp_path / 'at_the_end.py').write_text(
        'import atexit, pathlib\n'
        "atexit.register(lambda: pathlib.Path(__file__).with_name('cleaned_up').touch())\n"
    )
    config = tmp_path / 'sharded.py'
    config.write_text(
        f'_base_ = {str(ROOT / "configs/classify_vit.py")!r}\n'
        "custom_imports = dict(imports=['at_the_end'])\n"
        "model_wrapper_cfg = dict(type='FullyShardedDataParallel')\n"
    )
    launch = ['torch.distributed.run', '--standalone', '--nproc_per_node=2', '-m', 'memengine']
    said = run(*launch, 'measure', config, '--json', '--launcher', 'pytorch')
    figures = json.loads(said.splitlines()[-1])
    assert figures['peak_bytes'] == pytest.approx(figures['predicted_bytes'], rel=0.1)
    assert not (tmp_path / 'cleaned_up').exists()
