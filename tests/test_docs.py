"""Every code block of README.md and docs/ is run or checked.

What a block is follows from the page alone:

* ``python`` whose first line is a comment with a file name is written to that file. If it is a
  config it is checked whole; else a command on the page has to import it.
* ``python`` that only sets known settings is a config too, merged into the quick start's. Configs
  that name their ``_base_`` are trained for an iteration.
* other ``python`` is run; the blocks of a page share one namespace.
* ``bash`` commands are parsed, and checked as far as they go before anything is built.
* ``console`` commands are run (training for a few iterations) and print what stands below them;
  ``...`` stands for anything within a line.
* ``text`` after python is what it prints; any other is a picture, in which all files and functions
  exist.
"""

import ast
import contextlib
import io
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memengine._torch_private.distributed import CAN_SHARD_ON_CPU
from memengine.engine.cli.commands import convert, read_config
from memengine.engine.cli.main import main
from memengine.engine.cli.parser import make_parser
from memengine.engine.config.check import check_config, known_keys
from memengine.engine.config.file import load_config
from tests.docs_pages import (
    ROOT,
    TESTED,
    assert_prints,
    blocks_of,
    file_name,
    parametrize_pages,
    sources,
)

QUICK_START = 'configs/dino_vit.py'
DIRECTIVES = ('{toctree}', '{eval-rst}', '{include}')

# Settings that make a run quick, and independent of the ones before it in this process.
FEW = ['--max-iters', '2']
EACH = ['default_hooks.logger.interval=1', 'default_hooks.report.num_images=1']
TEN = ['--max-iters', '10']  # where the page shows a line of the log, by its number
WORKERS = ['{}_dataloader.num_workers=0', '{}_dataloader.persistent_workers=False']
BATCH = 'train_dataloader.batch_size=24'  # where a page tells nothing that depends on it
SMALL = {  # images that are evaluated, by the type of the data set
    'BankAndQueries': ['bank.indices=100', 'queries.indices=20'],
    'ImageDataset': ['indices=20'],
    'Stripes': ['size=20'],
}
_count = itertools.count()


# ------------------------------------------------------------------ a place to run in


@pytest.fixture
def workplace(tmp_path, monkeypatch, undrawn, techniques_of_its_own):
    """A folder with what a checkout has, as the current folder."""
    shutil.copytree(
        ROOT / 'configs', tmp_path / 'configs', ignore=shutil.ignore_patterns('__pycache__')
    )
    for name in ('tools', 'requirements', 'docs', 'tests', 'memengine', 'Makefile', 'setup.cfg'):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    return tmp_path


# ------------------------------------------------------------------ python


def is_config(text):
    """Whether a block sets settings and does nothing else."""
    body = ast.parse(text).body
    names = [
        target.id
        for statement in body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    if not names or not all(isinstance(s, (ast.Assign, ast.Delete)) for s in body):
        return False
    return '_base_' in names or bool({*names} & known_keys({}))


def is_whole_config(block):
    """Whether a block is a config that can be run as it stands, and no part for one."""
    return block.kind == 'python' and is_config(block.text) and '_base_' in block.text


def write_config(text, workplace):
    """Put a config where its bases are found; without any it goes on from the quick start."""
    if file := file_name(text):
        path = workplace / file
    else:
        named = [s.value for s in ast.parse(text).body if ast.unparse(s).startswith('_base_ =')]
        bases = re.findall(r"'([^':]+\.py)'", ''.join(map(ast.unparse, named)))  # not memengine::
        if not named:
            text = f"_base_ = 'memengine::{Path(QUICK_START).name}'\n{text}"
        folders = [workplace / 'mine', workplace, workplace / 'configs']
        fitting = [f for f in folders if all((f / base).resolve().is_file() for base in bases)]
        assert fitting, f'there is no {bases}'
        path = fitting[0] / f'block_{next(_count)}.py'
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    sys.path.append(str(path.parent))  # as the command line does
    return path


def run_python(text, namespace, workplace):
    """Run a block and return what it prints, or write it to its file and return None."""
    if is_config(text):
        check_config(load_config(write_config(text, workplace)))
        return None
    if file := file_name(text):
        ast.parse(text)
        (workplace / file).parent.mkdir(exist_ok=True, parents=True)
        (workplace / file).write_text(text)
        return None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, 'block', 'exec'), namespace)
    return out.getvalue()


# ------------------------------------------------------------------ bash


def commands_of(text):
    """The commands of a block, as lists of words."""
    joined = text.replace('\\\n', ' ')
    for line in joined.splitlines():
        for part in re.split(r'&&|;', line):
            # Brackets are no part of what shlex splits, as users are told to quote them.
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r'[A-Z_]+=.*', words[0]):
                words = words[1:]
            if words:
                yield words


def memengine_arguments(words):
    """What a command hands to memengine's command line, or None if it is another program."""
    if words[0] == 'memengine':
        return words[1:]
    if words[0] in ('torchrun', 'srun', 'python'):
        for script, command in (('tools/train.py', 'train'), ('tools/test.py', 'test')):
            if script in words:
                return [command, *words[words.index(script) + 1 :]]
    return None


def check_command(words, workplace):
    """Check a command without running it."""
    arguments = memengine_arguments(words)
    if arguments is not None:
        check_memengine(arguments, workplace)
    elif words[:2] == ['uv', 'pip']:
        check_pip(words[1:])
    elif words[0] == 'pip':
        check_pip(words)
    elif words[0] == 'make':
        targets = re.findall(r'^(\w+):', (ROOT / 'Makefile').read_text(), re.M)
        assert {*words[1:]} <= {*targets}, f'make has no {words[1:]}'
    elif words[0] == 'python' and words[1].endswith('.py'):
        source = (ROOT / words[1]).read_text()
        for option in (word for word in words[2:] if word.startswith('--')):
            assert f"'{option.partition('=')[0]}'" in source, f'{words[1]} has no {option}'
    elif words[0] in ('ruff', 'mypy', 'pytest') or words[:3] == ['python', '-m', 'pytest']:
        for word in words[1:]:
            assert '/' not in word or (ROOT / word.partition('::')[0]).exists(), word
    elif words[0] in ('cd', 'source', '.', 'git') or words[:3] == ['python', '-m', 'venv']:
        pass  # shell and git are not ours to test
    elif words[0] == 'tensorboard':
        assert 'tensorboard' in (ROOT / 'requirements/optional.txt').read_text()
    else:
        raise AssertionError(f'a command that no test knows: {shlex.join(words)}')


def check_memengine(arguments, workplace):
    args = make_parser().parse_args(arguments)
    if args.command in ('convert', 'verify', 'techniques'):
        return
    for checkpoint in (getattr(args, 'checkpoint', None), getattr(args, 'resume', None)):
        if isinstance(checkpoint, str):  # of a run that is not repeated here
            (workplace / checkpoint).parent.mkdir(parents=True, exist_ok=True)
            (workplace / checkpoint).touch()
    read_config(args)


def check_pip(words):
    """Requirements, extras and packages that an installation names."""
    requirements = ''.join(p.read_text() for p in (ROOT / 'requirements').glob('*.txt'))
    extras = re.search(
        r'\[options.extras_require\]\n(.*?)\n\n', (ROOT / 'setup.cfg').read_text(), re.S
    )
    assert words[1] == 'install', words
    rest = iter(words[2:])
    for word in rest:
        if word in ('-r', '-c'):
            assert (ROOT / next(rest)).is_file()
        elif word == '--torch-backend':
            assert next(rest) == 'cpu'
        elif word.startswith('.'):
            for extra in re.findall(r'[\w-]+', word):
                assert re.search(rf'^{extra} =', extras[1], re.M), f'no extra {extra}'
        elif not word.startswith('-') and word != 'uv':
            name = re.match(r'[\w-]+', word)[0]
            assert re.search(rf'^{name}\b', requirements, re.M), f'{name} is no requirement'


def check_console(text):
    """Run each command of a block, and compare what it prints with the lines below it."""
    settings = [] if re.search(r'batch_size|\[\d+/\d+\]', text) else [BATCH, *EACH]
    for part in re.split(r'^\$ ', text, flags=re.M)[1:]:
        command, expected = part.split('\n', 1)
        output = ''.join(run_command(words, expected, settings) for words in commands_of(command))
        assert_prints(expected, output)


def run_command(words, expected='', settings=()):
    """Run a command in this process, which fails if it is expected to; returns what it prints."""
    arguments = memengine_arguments(words)
    assert arguments is not None, f'only memengine is run here, not {words[0]}'
    settings = [*settings, f'experiment_name=docs_{next(_count)}']  # loggers go by this name
    loaders = ('train', 'val') if arguments[0] == 'train' else ('test',)
    settings += [setting.format(loader) for loader in loaders for setting in WORKERS]
    if arguments[0] == 'train' and Path(arguments[1]).exists():
        evaluated = load_config(arguments[1]).val_dataloader.dataset.type
        settings += [f'val_dataloader.dataset.{setting}' for setting in SMALL[evaluated]]
    runs = arguments[0] in ('train', 'test')
    options = ['--cfg-options', *settings] if runs else []
    few = FEW if BATCH in settings else TEN
    few = few if arguments[0] == 'train' and '--max-iters' not in arguments else []
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main([*arguments, *few, *options])
        except SystemExit as exit:
            status = exit.code
    assert (status != 0) is ('error:' in expected), out.getvalue()[-3000:]
    return out.getvalue()


# ------------------------------------------------------------------ text


def check_picture(text):
    """Files and functions in a drawing exist."""
    functions = re.findall(r'\b([a-z_]+)\(', text)
    files = [w for w in re.findall(r'[\w/]+(?:/|\.py)(?=[\s,]|$)', text) if w]
    assert functions or files, 'nothing in this block can be checked'
    for name in functions:
        assert f'def {name}(' in sources() or hasattr(torch.Tensor, name) or name in OPTIMIZER, name
    for name in files:
        assert any(ROOT.rglob(name.rstrip('/'))), f'there is no {name}'


OPTIMIZER = ('step', 'update_params')  # of MMEngine's wrapper


def check_page(page, workplace):
    namespace, printed, modules = {'__name__': 'docs'}, None, []
    for block in blocks_of(page):
        kind = block.kind
        if kind == 'python':
            printed = run_python(block.text, namespace, workplace)
            if printed is None and not is_config(block.text):
                modules.append(workplace / file_name(block.text))
        elif kind == 'bash':
            for words in commands_of(block.text):
                check_command(words, workplace)
        elif kind == 'console':
            check_console(block.text)
        elif kind == 'text' and printed is not None:
            assert_prints(block.text, printed)
            printed = None
        elif kind == 'text':
            check_picture(block.text)
        elif kind.partition(' ')[0] not in DIRECTIVES:
            raise AssertionError(
                f'line {block.line}: no test knows this block ({kind or "no kind"})'
            )
    imported = {getattr(module, '__file__', None) for module in sys.modules.values()}
    for module in modules:
        assert str(module) in imported, f'{module.name} is never used'


@parametrize_pages(TESTED)
def test_blocks(page, workplace):
    if page.name == 'fsdp.md' and not CAN_SHARD_ON_CPU and not torch.cuda.is_available():
        pytest.skip('fully_shard of torch 2.6 needs GPUs')
    check_page(page, workplace)


WRONG = {  # what is wrong: the page, and what is said of it
    'a block of no kind': ('```\nmemengine\n```\n', 'no test knows this block'),
    'a block of another kind': ('```yaml\na: 1\n```\n', 'no test knows this block'),
    'python that raises': ('```python\nimport memengine.none\n```\n', 'No module'),
    'python that prints another thing': (
        '```python\nprint(1)\n```\n\n```text\n2\n```\n',
        "'2' is not printed",
    ),
    'a config with a misspelt setting': (
        '```python\nmodel = dict(local_crop=3)\n```\n',
        "did you mean 'local_crops'",
    ),
    'a config of a base that is not there': (
        "```python\n_base_ = 'none.py'\n```\n",
        'there is no .*none.py',
    ),
    'a module that nothing imports': ('```python\n# mine/a.py\nx = id\n```\n', 'never used'),
    'a misspelt option': (f'```bash\nmemengine train {QUICK_START} --resum\n```\n', '2'),
    'no such config': ('```bash\nmemengine train no.py\n```\n', 'there is no config file'),
    'a misspelt key': (
        f'```bash\nmemengine train {QUICK_START} --cfg-options modl.a=1\n```\n',
        "did you mean 'model'",
    ),
    'an unknown command': ('```bash\nmemengin train\n```\n', 'a command that no test knows'),
    'an unknown package': ('```bash\npip install nonesuch\n```\n', 'is no requirement'),
    'an unknown extra': ("```bash\npip install -e '.[none]'\n```\n", 'no extra none'),
    'an unknown target': ('```bash\nmake nothing\n```\n', 'make has no'),
    'an unknown option of a tool': (
        '```bash\npython tools/analysis/report.py --colour\n```\n',
        'has no --colour',
    ),
    'another error': ('```console\n$ memengine train no.py\nerror: x\n```\n', 'not printed'),
    'no success': ('```console\n$ memengine train no.py\n```\n', 'there is no config file'),
    'no failure': (
        f'```console\n$ memengine test {QUICK_START} --help\nerror: x\n```\n',
        'usage',
    ),
    'a file that is not there': ('```text\nmemengine/\n  none.py\n```\n', 'there is no none.py'),
    'a function that is not there': ('```text\nnonesuch()\n```\n', 'nonesuch'),
}


@pytest.mark.parametrize('wrong', WRONG)
def test_what_is_wrong_is_found(wrong, workplace):
    text, complaint = WRONG[wrong]
    (workplace / 'page.md').write_text(text)
    with pytest.raises((Exception, SystemExit), match=complaint):
        check_page(workplace / 'page.md', workplace)


@pytest.mark.slow
@parametrize_pages([page for page in TESTED if any(b.kind == 'bash' for b in blocks_of(page))])
def test_commands_that_are_only_checked_above_run_too(page, workplace):
    commands = []
    for block in blocks_of(page):
        if block.kind == 'python' and is_config(block.text):
            write_config(block.text, workplace)
        elif block.kind == 'python' and file_name(block.text):
            run_python(block.text, {}, workplace)
        elif block.kind == 'bash':
            commands += commands_of(block.text)
    for words in commands:
        if words[0] == 'torchrun':
            run_ranks(words, workplace)
        elif words[0] != 'srun' and memengine_arguments(words) is not None:  # tests of launching
            provide_checkpoint(words, workplace)
            run_command(words, settings=[BATCH])


ABSENT = {  # what some configs need and a checkout lacks; they fail for the want of it alone
    'mine/trusting.py': 'load_from: there is no checkpoint work_dirs/old/checkpoint.pth',
    'mine/finetuned.py': 'load_from: there is no checkpoint work_dirs/dino_vit',
    'mine/folder.py': "there is no folder 'data/pictures/train'",
    'mine/split.py': "there is no folder 'data/pictures'",
    'mine/video.py': "there is no folder 'data/videos'",
    'mine/stream.py': 'failed with exit status 1: cat: /mnt/store/train-',
    'mine/dino_sharded.py': 'needs several processes',
    'mine/old.py': 'needs several processes',
    'mask-rcnn': 'there is no file backbone_checkpoint=',
}


@pytest.mark.slow
@parametrize_pages([p for p in TESTED if any(is_whole_config(b) for b in blocks_of(p))])
def test_configs_train(page, workplace):
    for block in blocks_of(page):
        if block.kind == 'python' and file_name(block.text) and not is_config(block.text):
            run_python(block.text, {}, workplace)
    for block in filter(is_whole_config, blocks_of(page)):
        path = write_config(block.text, workplace)
        absent = next((said for part, said in ABSENT.items() if part in block.text), None)
        evaluation = [f'val_{part}=None' for part in ('dataloader', 'cfg', 'evaluator')]
        few = ['--max-iters', '1', '--cfg-options', 'default_hooks.report=None', *evaluation]
        few += ['custom_hooks=None', f'experiment_name=docs_{next(_count)}', BATCH]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = main(
                ['train', str(path), *few, *(setting.format('train') for setting in WORKERS)]
            )
        assert status == (absent is not None), out.getvalue()[-3000:]
        assert absent is None or absent in out.getvalue()


def provide_checkpoint(words, workplace):
    """Have the checkpoint that a command names, of a training as short as can be."""
    args = make_parser().parse_args(memengine_arguments(words))
    for path in (getattr(args, name, None) for name in ('checkpoint', 'resume', 'source', 'path')):
        if isinstance(path, str) and path != 'auto' and not Path(path).exists():
            config = getattr(args, 'config', QUICK_START)
            short = ['memengine', 'train', config, '--max-iters', '2', '--work-dir', 'short']
            run_command(short, settings=[BATCH])
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if path.endswith('.dcp'):
                convert('short/iter_2.pth', path)
            else:
                shutil.copy('short/iter_2.pth', path)


def run_ranks(words, workplace):
    """Run a torchrun command on CPU; its port is a free one, and no run was there before."""
    shutil.rmtree(workplace / 'work_dirs', ignore_errors=True)
    module = [sys.executable, '-m', 'torch.distributed.run', '--rdzv-backend=c10d']
    module += ['--rdzv-endpoint=localhost:0', *words[1:], '--max-iters', '2']
    done = subprocess.run(module, cwd=workplace, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert 'Stopped after iteration 2' in done.stdout + done.stderr
