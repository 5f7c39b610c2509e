"""The command line, from the arguments to the exit status."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer

import memengine
from memengine.engine.checkpoint.saving import SaveError
from memengine.engine.cli import commands
from memengine.engine.cli.commands import _set_amp
from memengine.engine.cli.main import main
from memengine.engine.config.file import load_config

ROOT = Path(__file__).parents[3]

MODULE = """
import os
import signal

import torch
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import Dataset

from memengine.engine import run_step
from memengine.registry import DATASETS, HOOKS, MODELS
from mmengine.hooks import Hook


@DATASETS.register_module()
class CliData(Dataset):
    def __init__(self, size=16, fails=''):
        self.size, self.fails = size, fails

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.fails:
            raise ValueError(f'image {index} {self.fails}')
        return dict(x=torch.tensor([float(index)]), y=torch.tensor([2.0 * index]))


@MODELS.register_module()
class CliModel(BaseModel):
    def __init__(self, width=2, fails=None):
        super().__init__()
        if width < 1:
            raise ValueError(f'width must be at least 1, got {width}')
        if fails == 'signal':
            os.kill(os.getpid(), signal.SIGTERM)
        self.net = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))
        self.fails = fails

    def train_step(self, data, optim_wrapper):
        return run_step(self, data, optim_wrapper)

    def forward(self, x, y, mode='loss'):
        if self.fails == 'memory':
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB. GPU 0 ...')
        if self.fails == 'interrupt':
            raise KeyboardInterrupt
        if self.fails == 'assert':
            assert self.training is None
        out = self.net(x)
        return {'loss': (out - y).square().mean()} if mode == 'loss' else [{'out': o} for o in out]
"""
METRIC = """
from mmengine.evaluator import BaseMetric

from memengine.registry import METRICS


@METRICS.register_module()
class CliMetric(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.extend(float(s['out']) for s in data_samples)

    def compute_metrics(self, results):
        return {'mean': sum(results) / len(results)}
"""
CONFIG = """
custom_imports = dict(imports=['cli_parts', 'cli_metric'])
model = dict(type='CliModel', width=2)
train_dataloader = dict(
    batch_size=4,
    dataset=dict(type='CliData'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
)
train_cfg = dict(max_epochs=2)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=1e-4))
test_dataloader = dict(train_dataloader, sampler=dict(type='DefaultSampler', shuffle=False))
test_cfg = dict()
test_evaluator = dict(type='CliMetric')
randomness = dict(seed=1)
default_hooks = dict(logger=dict(type='LoggerHook', interval=1))
log_level = 'WARNING'
visualizer = dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and the modules that it imports, outside the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'CUBLAS_WORKSPACE_CONFIG'):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / 'cli_parts.py').write_text(MODULE)
    (tmp_path / 'cli_metric.py').write_text(METRIC)
    (tmp_path / 'config.py').write_text(CONFIG)
    yield tmp_path
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cli(folder, capsys):
    """Run the command line; returns its exit status and what it said on stderr."""

    def run(*args):
        status = run_main(*args)
        said = [line for line in capsys.readouterr().err.splitlines() if 'memengine' in line[:9]]
        return status, '\n'.join(said)

    return run


def run_main(*args):
    """``main`` as in a process of its own: MMEngine keeps what has a name while a process lives."""
    for cls in (DefaultScope, MessageHub, MMLogger, Visualizer):
        cls._instance_dict.clear()
    return main([str(arg) for arg in args])


def options(*pairs):
    return ['--cfg-options', *pairs]


def scalars(work_dir='work_dirs/config'):
    """What was logged, a dict for each iteration."""
    (path,) = Path(work_dir).glob('*/vis_data/scalars.json')
    return rows(path)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(work_dir='work_dirs/config'):
    """The config that the run wrote out, as text without blanks."""
    return Path(work_dir, 'config.py').read_text().replace(' ', '').replace('\n', '')


# -- checkpoints -------------------------------------------------------------------------------


def test_a_sharded_checkpoint_is_resumed_converted_and_tested(cli, folder):
    sharded = options('default_hooks.checkpoint.sharded=True')
    assert cli('train', 'config.py', '--max-iters', 3, *sharded)[0] == 0
    assert cli('train', 'config.py', '--resume', 'auto', *sharded)[0] == 0
    last = 'work_dirs/config/epoch_2.dcp'
    assert [row['iter'] for path in sorted(folder.rglob('scalars.json')) for row in rows(path)] == [
        *range(1, 9)
    ]
    assert cli('convert', last, 'weights.safetensors') == (0, '')
    for checkpoint in (last, 'weights.safetensors'):
        assert cli('test', 'config.py', checkpoint, '--work-dir', checkpoint[:4])[0] == 0
    means = [json.loads(path.read_text())['mean'] for path in folder.glob('w*/*/*.json')]
    assert len(means) == 2 and means[0] == means[1]


def test_what_is_wrong_with_a_conversion_is_said(cli):
    status, said = cli('convert', 'no.dcp', 'a.pth')
    assert status == 1
    assert said.splitlines()[0] == 'memengine: error: SOURCE: there is no checkpoint no.dcp'


# -- training ----------------------------------------------------------------------------------


def test_train_with_a_module_from_outside(cli):
    assert cli('train', 'config.py') == (0, '')
    losses = [row['loss'] for row in scalars()]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert Path('work_dirs/config/epoch_2.pth').is_file()


def test_options_override_the_config(cli):
    pairs = options('optim_wrapper.optimizer.lr=1e-3', 'train_cfg.max_epochs=1')
    assert cli('train', 'config.py', *pairs, '--work-dir', 'elsewhere') == (0, '')
    rows = scalars('elsewhere')
    assert len(rows) == 4
    assert rows[0]['lr'] == 1e-3


def test_max_iters_ends_training_and_resume_goes_on(cli):
    assert cli('train', 'config.py', '--work-dir', 'whole') == (0, '')
    assert cli('train', 'config.py', '--max-iters', 3) == (0, '')
    assert len(scalars()) == 3
    first = [row['loss'] for row in scalars()]
    for path in Path('work_dirs/config').glob('*/vis_data'):
        path.rename('first')
    assert cli('train', 'config.py', '--resume') == (0, '')
    assert first + [row['loss'] for row in scalars()] == [row['loss'] for row in scalars('whole')]


def test_max_iters_ends_another_package_s_loop(cli):
    with open('config.py', 'a') as config:
        config.write("\ntrain_cfg = dict(type='mmengine.EpochBasedTrainLoop', max_epochs=2)\n")
    assert cli('train', 'config.py', '--max-iters', 3) == (0, '')
    assert len(scalars()) == 3
    assert torch.load('work_dirs/config/iter_3.pth', weights_only=False)['meta']['iter'] == 3
    assert Path('work_dirs/config/last_checkpoint').read_text().endswith('iter_3.pth')


def test_resume_from_a_path(cli):
    assert cli('train', 'config.py', '--max-iters', 6, '--work-dir', 'first')[0] == 0
    assert cli('train', 'config.py', '--resume', 'first/iter_6.pth') == (0, '')
    assert len(scalars()) == 2


@pytest.mark.slow
@pytest.mark.fault(
    'A work dir has spaces, quotes, percent signs or any letters in its name, under LC_ALL=C',
    'the run saves there and goes on',
)
@pytest.mark.parametrize('name', ['ünï 日本', 'a\'b"c %s 100% {x} #$d\\n [e]*\n' + 'n' * 200])
def test_a_work_dir_has_any_name(folder, name):
    command = [sys.executable, '-m', 'memengine', 'train', 'config.py', '--work-dir', name]
    environment = {**os.environ, 'LC_ALL': 'C', 'PYTHONPATH': str(ROOT)}
    for limit in (['--max-iters', '2'], ['--max-iters', '3', '--resume']):
        subprocess.run([*command, *limit], env=environment, check=True)
    assert (Path(name) / 'last_checkpoint').read_text().endswith('iter_3.pth')
    assert len([path for path in Path(name).iterdir() if path.suffix == '.pth']) == 2


def test_resume_without_a_checkpoint_starts_from_the_config_s_weights(cli):
    assert cli('train', 'config.py', '--max-iters', 1, '--work-dir', 'first')[0] == 0
    pairs = options('load_from=first/iter_1.pth', 'optim_wrapper.optimizer.lr=1e-9')
    assert cli('train', 'config.py', '--resume', *pairs) == (0, '')
    assert len(scalars()) == 8, 'load_from names weights to start from, not a run to go on with'


def test_test(cli):
    assert cli('train', 'config.py')[0] == 0
    assert cli('test', 'config.py', 'work_dirs/config/epoch_2.pth', '--work-dir', 'tested') == (
        0,
        '',
    )
    assert 'mean' in json.loads(next(Path('tested').glob('*/*.json')).read_text())


def test_switches_reach_the_config(cli):
    assert cli('train', 'config.py', '--seed', 7, '--deterministic', '--amp', 'bf16')[0] == 0
    assert 'randomness=dict(deterministic=True,seed=7)' in written()
    assert "precision='bf16'" in written()
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'


def test_values_of_options(cli):
    pairs = [
        'vars.text=a b',
        'vars.list=[1,2]',
        'vars.tuple=(1,x)',
        'vars.none=None',
        'vars.yes=true',
        'vars.dicts=[dict(a=1,b=(\'y\',)),{"c": []}]',
    ]
    assert cli('train', 'config.py', '--max-iters', 1, *options(*pairs))[0] == 0
    written = load_config('work_dirs/config/config.py').vars
    dicts = [dict(a=1, b=('y',)), dict(c=[])]
    assert written == dict(
        dicts=dicts, list=[1, 2], none=None, text='a b', tuple=(1, 'x'), yes=True
    )


# -- what is refused before anything is built --------------------------------------------------


@pytest.mark.parametrize(
    ('args', 'said'),
    [
        (
            ['config.py', *options('optim_wraper.optimizer.lr=1')],
            "memengine: error: unknown key 'optim_wraper': did you mean 'optim_wrapper'?",
        ),
        (
            ['config.py', *options('optim_wrapper.optimizer.lrr=1')],
            "memengine: error: optim_wrapper.optimizer.lrr: SGD takes no argument 'lrr': "
            "did you mean 'lr'?",
        ),
        (
            ['config.py', *options('train_dataloader.batch_size=0')],
            'memengine: error: train_dataloader.batch_size: must be a positive integer, got 0',
        ),
        (
            ['confg.py'],
            'memengine: error: there is no config file confg.py: did you mean config.py?',
        ),
        (
            ['config.py', '--resume', 'x.pth'],
            'memengine: error: --resume: there is no checkpoint x.pth; name a checkpoint, or the '
            'folder of a run',
        ),
        (
            ['config.py', *options('load_from=x.pth')],
            'memengine: error: load_from: there is no checkpoint x.pth; name a checkpoint, or the '
            'folder of a run',
        ),
        (
            ['config.py', *options('load_from=dict(path="x", part="net")')],
            'memengine: error: load_from: there is no checkpoint x; name a checkpoint, or the '
            'folder of a run',
        ),
        (
            ['config.py', '--work-dir', 'config.py'],
            'memengine: error: work_dir: config.py cannot be the folder of a run: there is a file; '
            'name another by --work-dir or work_dir',
        ),
        (
            ['config.py', '--work-dir', 'config.py/x'],
            'memengine: error: work_dir: config.py/x cannot be the folder of a run: Not a '
            'directory; name another by --work-dir or work_dir',
        ),
        (
            ['config.py', '--seed', '-1'],
            'memengine: error: randomness.seed: must be an integer of 0 or more, or None, got -1',
        ),
        (
            ['config.py', '--max-iters', '0'],
            'memengine: error: --max-iters must be at least 1, got 0',
        ),
        (
            ['config.py', *options('activation_checkpointing=net.blocks')],
            "memengine: error: activation_checkpointing: CliModel has no module 'net.blocks'",
        ),
        (
            ['config.py', *options('dropit=dict(gamma=0.5, exclude=["nett"])')],
            "memengine: error: dropit: CliModel has no module 'nett'; did you mean 'net'?",
        ),
    ],
)
def test_refusals(cli, args, said):
    assert cli('train', *args) == (1, said)
    assert not Path('work_dirs').exists()


def test_an_argument_that_a_network_does_not_take_is_refused_before_there_is_a_folder(cli):
    backbone = 'dict(type="TimmBackbone", model_name="test_efficientnet", dropp=1)'
    model = f'model=dict(_delete_=True, type="Classifier", num_classes=2, backbone={backbone})'
    status, said = cli('train', 'config.py', *options(model))
    assert status == 1 and "unexpected keyword argument 'dropp'" in said, said
    assert not Path('work_dirs').exists()


def test_several_problems_are_all_told(folder, capsys):
    pairs = options('train_dataloader.batch_size=0', 'train_cfg.max_epoch=2')
    assert run_main('train', 'config.py', *pairs) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == 'memengine: error: 2 problems in the config'
    assert said[1].startswith('  train_dataloader.batch_size: ')
    assert said[2].startswith('  train_cfg.max_epoch: ')


def test_checkpoint_to_test_must_be_there(cli):
    Path('epoch_1.pth').touch()
    said = 'there is no checkpoint epoch_l.pth: did you mean epoch_1.pth?'
    expected = f'memengine: error: CHECKPOINT: {said}'
    assert cli('test', 'config.py', 'epoch_l.pth') == (1, expected)


@pytest.mark.parametrize(
    ('command', 'keys', 'said'),
    [
        (
            ['train'],
            ['train_dataloader', 'train_cfg', 'optim_wrapper'],
            'no train_dataloader, train_cfg and optim_wrapper, so there is nothing to train',
        ),
        (
            ['test', 'a.pth'],
            ['test_dataloader', 'test_cfg', 'test_evaluator'],
            'no test_dataloader, test_cfg and test_evaluator, so there is nothing to test',
        ),
    ],
)
def test_nothing_to_do(cli, command, keys, said):
    Path('a.pth').touch()
    pairs = options(*(f'{key}=None' for key in keys))
    expected = f'memengine: error: config.py has {said}'
    assert cli(command[0], 'config.py', *command[1:], *pairs) == (1, expected)


def test_amp_is_refused_where_it_cannot_be_taken(cli):
    with open('cli_metric.py', 'a') as file:
        file.write(
            'from memengine.registry import OPTIM_WRAPPERS\n'
            '@OPTIM_WRAPPERS.register_module(force=True)\n'
            'class CliWrapper:\n    def __init__(self, optimizer):\n        pass\n'
        )
    sys.modules.pop('cli_metric', None)
    text = Path('cli_metric.py').read_text().replace('@METRICS.register_module()', '')
    Path('cli_metric.py').write_text(text)
    said = (
        "memengine: error: --amp: optim_wrapper.type='CliWrapper' takes neither precision nor "
        'dtype; leave --amp out, or use OptimWrapper'
    )
    pairs = options('optim_wrapper.type=CliWrapper')
    assert cli('train', 'config.py', '--amp', 'fp16', *pairs) == (1, said)


def test_amp_on_mmengines_own_wrapper_and_on_several(cli):
    cfg = load_config('config.py', {'optim_wrapper.type': 'mmengine.OptimWrapper'})
    cfg.default_scope = 'memengine'
    _set_amp(cfg, 'fp16')
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper'
    assert cfg.optim_wrapper.dtype == 'float16'
    cfg.optim_wrapper = dict(
        a=dict(optimizer=dict(type='SGD')), b=dict(type='AmpOptimWrapper'), constructor='C'
    )
    _set_amp(cfg, 'bf16')
    assert cfg.optim_wrapper.a.precision == 'bf16'
    assert cfg.optim_wrapper.b.dtype == 'bfloat16'


def test_torchrun_without_launcher_is_refused(cli, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    status, said = cli('train', 'config.py')
    assert status == 1
    assert said.startswith('memengine: error: --launcher: 2 processes were started')


# -- failures of building and training ---------------------------------------------------------


def test_a_build_error_names_the_setting(cli):
    status, said = cli('train', 'config.py', *options('model.width=0'))
    assert status == 1
    first, second = said.splitlines()
    assert first == 'memengine: error: model (CliModel): width must be at least 1, got 0'
    assert second.startswith('memengine: run again with --debug for the traceback')


def test_the_traceback_goes_to_the_log_or_with_debug_to_the_terminal(folder, capsys):
    pairs = options('model.fails=assert')
    assert run_main('train', 'config.py', *pairs) == 1
    said = capsys.readouterr().err
    assert 'Traceback' not in said
    assert 'memengine: error: model (CliModel): AssertionError (cli_parts.py, line ' in said
    (log,) = Path('work_dirs/config').glob('*/*.log')
    assert f'(it is in {log})' in said
    assert 'Traceback (most recent call last)' in log.read_text()
    assert run_main('train', 'config.py', '--debug', *pairs) == 1
    said = capsys.readouterr().err
    assert 'Traceback' in said
    assert said.rstrip().splitlines()[-1].startswith('memengine: error: ')


def test_an_error_in_a_data_loader_worker(cli):
    pairs = options('train_dataloader.num_workers=1', 'train_dataloader.dataset.fails=is broken')
    status, said = cli('train', 'config.py', *pairs)
    assert status == 1
    assert said.splitlines()[0].endswith('is broken')
    assert 'DataLoader' not in said


def test_out_of_memory(cli):
    status, said = cli('train', 'config.py', *options('model.fails=memory'))
    assert status == 1
    assert said.startswith(
        'memengine: error: out of memory: CUDA out of memory. '
        'Keep train_dataloader.batch_size (now 4) and run it in slices'
    )


def test_interrupt_says_how_to_go_on(cli):
    interrupted = options('model.fails=interrupt')
    assert cli('train', 'config.py', *interrupted) == (130, 'memengine: interrupted')
    assert cli('train', 'config.py', '--max-iters', 1, '--work-dir', 'w')[0] == 0
    status, said = cli('train', 'config.py', '--work-dir', 'w', *interrupted)
    again = 'memengine train config.py --work-dir w --cfg-options model.fails=interrupt --resume'
    assert (status, said) == (130, f'memengine: interrupted; go on with: {again}')


@pytest.mark.fault('SIGTERM while a run starts', 'it ends at once, status 143')
def test_a_signal_during_start_up_ends_at_once(cli):
    said = (143, 'memengine: interrupted by SIGTERM')
    assert cli('train', 'config.py', *options('model.fails=signal')) == said


def test_a_rank_says_which_it_is(cli, monkeypatch):
    monkeypatch.setenv('RANK', '3')
    status, said = cli('train', 'confg.py', '--launcher', 'pytorch')
    assert status == 1
    assert said.startswith('memengine [rank 3]: error: there is no config file')


# -- usage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('args', 'said'),
    [
        (['trian', 'config.py'], 'did you mean train?'),
        (
            ['train', 'config.py', '--work-dri', 'x'],
            'unknown argument --work-dri: did you mean --work-dir?',
        ),
        (['train', 'config.py', '--resum'], 'unknown argument --resum: did you mean --resume?'),
        (['train', 'config.py', '--cfg-option', 'a=1'], 'did you mean --cfg-options?'),
        (['train', 'config.py', 'other.py'], 'unknown argument other.py'),
        (['train', 'config.py', '--amp', 'bf61'], 'did you mean bf16?'),
        (['train', 'config.py', '--cfg-options', 'a'], "wants KEY=VALUE, got 'a'"),
        (['train', '--cfg-options', 'config.py'], "got 'config.py'; CONFIG goes before it"),
        (
            ['train', 'config.py', '--cfg-options', 'a=[1'],
            "--cfg-options a: '[1' is no value: its [ is not closed; a list is [a,b]",
        ),
        (['test', 'config.py'], 'required: CHECKPOINT'),
        (['train', 'config.py', '--max-iters', 'x'], "invalid int value: 'x'"),
    ],
)
def test_wrong_usage(folder, capsys, args, said):
    with pytest.raises(SystemExit) as error:
        main(args)
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as error:
        main(['--version'])
    assert error.value.code == 0
    assert capsys.readouterr().out.strip() == f'memengine {memengine.__version__}'


@pytest.mark.parametrize('command', ['train', 'test'])
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit):
        main([command, '--help'])
    said = capsys.readouterr().out
    assert 'examples:' in said
    assert f'memengine {command} dino_vit' in said


def test_waiting_threads_leave_the_cores_to_others(cli, monkeypatch):
    monkeypatch.setenv('GOMP_SPINCOUNT', '3')
    cli('train', 'nothing.py')
    assert os.environ['GOMP_SPINCOUNT'] == '3', 'what the user sets goes first'
    monkeypatch.delenv('GOMP_SPINCOUNT')
    cli('train', 'nothing.py')
    assert int(os.environ['GOMP_SPINCOUNT']) > 0


def test_local_rank_of_the_old_launcher(folder, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '')
    monkeypatch.delenv('LOCAL_RANK')
    assert run_main('train', 'nothing.py', '--local_rank=3') == 1
    assert os.environ.pop('LOCAL_RANK') == '3'


# -- as a program ------------------------------------------------------------------------------


def program(*args, **env):
    """The tools from a source checkout, with the package not installed and not on the path."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **env}
    env.pop('PYTHONPATH', None)
    return subprocess.run(
        [sys.executable, *map(str, args)], env=env, capture_output=True, text=True, timeout=300
    )


def test_who_stops_reading_ends_it_quietly():
    command = [sys.executable, '-m', 'memengine', 'techniques']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    process.stdout.close()
    with process:
        assert process.stderr.read() == b''
    assert process.returncode == 141


def test_help_imports_neither_torch_nor_mmengine():
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from memengine.engine.cli.main import main
try:
    main(['train', '--help'])
except SystemExit:
    print([name for name in ('torch', 'mmengine') if name in sys.modules])
"""
    done = program('-c', code)
    assert done.stdout.splitlines()[-1] == '[]', done.stderr


@pytest.mark.slow
def test_tools_work_from_a_checkout(folder):
    done = program(ROOT / 'tools/train.py', 'config.py', '--max-iters', 2)
    assert done.returncode == 0, done.stderr
    done = program(ROOT / 'tools/test.py', 'config.py', 'work_dirs/config/iter_2.pth')
    assert done.returncode == 0, done.stderr
    done = program(ROOT / 'tools/train.py', 'config.py', *options('train_cgf.max_epochs=1'))
    assert done.returncode == 1
    assert done.stderr.strip().endswith("unknown key 'train_cgf': did you mean 'train_cfg'?")


def test_a_rank_that_cannot_write_its_traceback_ends_with_the_status_of_its_error(
    folder, monkeypatch, capsys
):
    def train(args, cfg):
        raise SaveError('no checkpoint could be written')

    monkeypatch.setenv('RANK', '1')
    monkeypatch.setattr(commands, 'run_command', train)
    given = [
        'config.py',
        '--launcher',
        'pytorch',
        '--work-dir',
        '/sys',
    ]  # not even root writes there
    assert run_main('train', *given) == 74
    said = capsys.readouterr().err
    assert 'memengine [rank 1]: error: no checkpoint could be written' in said
    assert 'error_rank1.txt' not in said


@pytest.mark.parametrize('given', [[], ['--resume'], ['--resume', 'w 1/iter_1.pth']])
def test_what_an_interrupted_run_goes_on_with_has_its_settings(cli, given):
    assert cli('train', 'config.py', '--max-iters', 1, '--work-dir', 'w 1') == (0, '')
    command = ['config.py', '--seed', 5, '--work-dir', 'w 1', *options('model.fails=interrupt')]
    status, said = cli('train', *command, *given)
    assert status == 130
    _, _, line = said.partition('go on with: memengine ')
    assert shlex.split(line) == [str(word) for word in ('train', *command, *given)] + (
        [] if given == ['--resume'] else ['--resume']
    )
    assert run_main(*shlex.split(line)) == 130, 'the same again'


@pytest.mark.slow
@pytest.mark.parametrize(
    ('number', 'status', 'how'),
    [(signal.SIGINT, 130, 'interrupted'), (signal.SIGUSR1, 75, 'interrupted by SIGUSR1')],
)
def test_a_signal_saves_and_says_how_to_go_on(folder, number, status, how):
    command = [sys.executable, str(ROOT / 'tools/train.py'), 'config.py']
    pairs = options('train_cfg.max_epochs=100000', 'default_hooks.logger.interval=1')
    process = subprocess.Popen([*command, *pairs], stderr=subprocess.PIPE, text=True)
    try:
        while not list(folder.glob('work_dirs/config/*/vis_data/scalars.json')):
            assert process.poll() is None
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    assert said.rstrip().endswith(
        f'memengine: {how}; go on with: memengine train config.py {shlex.join(pairs)} --resume'
    )


@pytest.mark.slow
def test_two_ranks_under_torchrun(folder):
    run = [
        *('-m', 'torch.distributed.run', '--nproc_per_node', 2, '--standalone'),
        *(ROOT / 'tools/train.py', 'config.py', '--launcher', 'pytorch'),
    ]
    done = program(*run)
    assert done.returncode == 0, done.stderr
    assert len(scalars()) == 4, 'two ranks share the data'
    done = program(*run, *options('model.width=0'))
    assert done.returncode != 0
    assert 'memengine [rank 1]: error: model (CliModel): width must be at least 1' in done.stderr
    assert 'it is in work_dirs/config/error_rank1.txt' in done.stderr
    assert 'ValueError' in Path('work_dirs/config/error_rank1.txt').read_text()
    assert done.stderr.count('Traceback') <= 1, "torchrun's own, at its end"


class TestYapfsCache:
    """It is written by the first process that imports yapf, and is there before all of it is."""

    @pytest.fixture
    def start(self, tmp_path):
        """Start a process that imports yapf, whose caches are cut off; they are given, too."""
        env = {**os.environ, 'XDG_CACHE_HOME': str(tmp_path)}
        subprocess.run([sys.executable, '-c', 'import yapf'], env=env, check=True)
        whole = {path: path.read_bytes() for path in tmp_path.glob('YAPF/*/*.pickle')}
        for path, content in whole.items():
            path.write_bytes(content[: len(content) // 2])
        code = 'from memengine.engine.cli.main import import_yapf; print("begins"); import_yapf()'

        def start():
            process = subprocess.Popen(
                [sys.executable, '-u', '-c', code], env=env, stdout=-1, stderr=-1, text=True
            )
            assert process.stdout.readline() == 'begins\n'
            return process, whole

        return start

    def test_it_is_waited_for(self, start):
        process, whole = start()
        assert whole
        time.sleep(0.5)
        for path, content in whole.items():
            path.write_bytes(content)
        assert process.communicate()[1] == ''
        assert process.returncode == 0

    def test_one_that_stays_cut_off_is_named(self, start, tmp_path):
        error = start()[0].communicate()[1]
        assert error.endswith(f'remove the folder {tmp_path}/YAPF\n')
