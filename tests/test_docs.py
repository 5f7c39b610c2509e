"""Every code block of README.md and docs/ is run or checked, and what they name exists.

What a block is follows from the page alone:

* ``python`` whose first line is a comment with a file name is written to that file. If it is a
  config it is checked whole; else a command on the page has to import it.
* ``python`` that only sets known settings is a config too, merged into the quick start's.
* other ``python`` is run; the blocks of a page share one namespace.
* ``bash`` commands are parsed, and checked as far as they go before anything is built.
* ``console`` commands are run (training for a few iterations) and print what stands below them;
  ``...`` stands for anything within a line.
* ``text`` after python is what it prints; any other is a picture, in which all files and functions
  exist.
"""

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mmengine.evaluator
import mmengine.hooks
import pytest
import torch
from mmengine.config import Config

from memengine.cli import main
from memengine.cli_parser import make_parser
from memengine.engine.commands import read_config
from memengine.engine.config import check_config, known_keys
from memengine.engine.config_file import load_config
from memengine.engine.config_types import arguments_of, find_anywhere

ROOT = Path(__file__).parent.parent
DOCS = sorted(p for p in (ROOT / 'docs').rglob('*.md') if '_build' not in p.parts)
TESTED = [*([ROOT / 'README.md'] if (ROOT / 'README.md').exists() else []), *DOCS]
ALL = [*TESTED, ROOT / 'AGENTS.md', ROOT / 'CHANGELOG.md']
QUICK_START = 'configs/dino_vit.py'
FENCE = re.compile(r'^```([^\n`]*)\n(.*?)^```[ \t]*$', re.M | re.S)
INLINE = re.compile(r'(?<!`)`([^`\n]+)`(?!`)')
DIRECTIVES = ('{toctree}', '{eval-rst}', '{include}')

# Settings that make a run quick, and independent of the ones before it in this process.
FEW = ['--max-iters', '10']
WORKERS = ['{}_dataloader.num_workers=0', '{}_dataloader.persistent_workers=False']
SMALL = ['val_dataloader.dataset.bank.indices=200', 'val_dataloader.dataset.queries.indices=50']
_count = itertools.count()

# Options of other programs that prose may name.
OTHER_OPTIONS = {'--nproc_per_node', '--index-url', '--help', '--max-restarts'}


def name_of(page):
    return str(page.relative_to(ROOT))


pages = functools.partial(pytest.mark.parametrize, 'page', ids=name_of)


@dataclass
class Block:
    kind: str
    text: str
    line: int


def blocks_of(page):
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding='utf-8')
    return [
        Block(match[1].strip(), match[2], text.count('\n', 0, match.start()) + 1)
        for match in FENCE.finditer(text)
    ]


def prose_of(page):
    """A page without its fenced blocks and comments."""
    text = page.read_text(encoding='utf-8')
    return re.sub(r'<!--.*?-->', '', FENCE.sub('', text), flags=re.S)


# ------------------------------------------------------------------ a place to run in


@pytest.fixture
def workplace(tmp_path, monkeypatch):
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


def file_name(text):
    """The file that a block is the content of, from its first line."""
    match = re.match(r'# ([\w./-]+\.py)\n', text)
    return match and match[1]


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


def write_config(text, workplace):
    """Put a config where its bases are found; without any it goes on from the quick start."""
    if file := file_name(text):
        path = workplace / file
    else:
        bases = re.findall(r"'([^']+\.py)'", (re.search(r'^_base_ = .*?$', text, re.M) or [''])[0])
        if not bases:
            text, bases = f"_base_ = '../{QUICK_START}'\n{text}", [f'../{QUICK_START}']
        folders = [workplace / 'mine', workplace, workplace / 'configs']
        folder = next(
            (f for f in folders if all((f / base).resolve().is_file() for base in bases)), None
        )
        assert folder is not None, f'there is no {bases}'
        path = folder / f'block_{next(_count)}.py'
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
    if words[0] == 'torchrun' or words[:1] == ['python']:
        for script, command in (('tools/train.py', 'train'), ('tools/test.py', 'test')):
            if script in words:
                return [command, *words[words.index(script) + 1 :]]
    return None


def check_command(words, workplace):
    """Check a command without running it."""
    arguments = memengine_arguments(words)
    if arguments is not None:
        check_memengine(arguments, workplace)
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
        pytest.fail(f'a command that no test knows: {shlex.join(words)}')


def check_memengine(arguments, workplace):
    args = make_parser().parse_args(arguments)
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
        if word in ('-r', '--requirement'):
            assert (ROOT / next(rest)).is_file()
        elif word == '--index-url':
            next(rest)
        elif word.startswith('.'):
            for extra in re.findall(r'[\w-]+', word):
                assert re.search(rf'^{extra} =', extras[1], re.M), f'no extra {extra}'
        elif not word.startswith('-'):
            name = re.match(r'[\w-]+', word)[0]
            assert re.search(rf'^{name}\b', requirements, re.M), f'{name} is no requirement'


def check_console(text):
    """Run each command of a block, and compare what it prints with the lines below it."""
    for part in re.split(r'^\$ ', text, flags=re.M)[1:]:
        command, expected = part.split('\n', 1)
        output = ''.join(run_command(words, 'error:' in expected) for words in commands_of(command))
        assert_prints(expected, output)


def run_command(words, fails):
    """Run a command in this process; returns what it prints."""
    arguments = memengine_arguments(words)
    assert arguments is not None, f'only memengine is run here, not {words[0]}'
    settings = [f'experiment_name=docs_{next(_count)}']  # loggers go by this name
    loaders = ('train', 'val') if arguments[0] == 'train' else ('test',)
    settings += [setting.format(loader) for loader in loaders for setting in WORKERS]
    if arguments[0] == 'train' and not fails:
        settings += SMALL
    few = FEW if arguments[0] == 'train' and '--max-iters' not in arguments else []
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main([*arguments, *few, '--cfg-options', *settings])
        except SystemExit as exit:
            status = exit.code
    assert (status != 0) is fails, out.getvalue()[-3000:]
    return out.getvalue()


# ------------------------------------------------------------------ text


def assert_prints(expected, output):
    """Each expected line is one of the output, in this order."""
    lines = [' '.join(line.split()) for line in re.sub(r'\x1b\[[\d;]*m', '', output).splitlines()]
    at = 0
    for line in filter(str.strip, expected.splitlines()):
        pattern = '.*'.join(map(re.escape, ' '.join(line.split()).split('...')))
        found = next((i for i in range(at, len(lines)) if re.fullmatch(pattern, lines[i])), None)
        assert found is not None, f'{line!r} is not printed; there is:\n' + '\n'.join(lines[-80:])
        at = found + 1


@functools.cache
def sources():
    return '\n'.join(p.read_text() for p in (ROOT / 'memengine').rglob('*.py'))


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


@pages(TESTED)
def test_blocks(page, workplace):
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
            pytest.fail(
                f'{name_of(page)}:{block.line}: no test knows this block ({kind or "no kind"})'
            )
    imported = {getattr(module, '__file__', None) for module in sys.modules.values()}
    for module in modules:
        assert str(module) in imported, f'{name_of(page)}: {module.name} is never used'


@pytest.mark.slow
@pages([page for page in TESTED if any(b.kind == 'bash' for b in blocks_of(page))])
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
        elif memengine_arguments(words) is not None:
            provide_checkpoint(words, workplace)
            run_command(words, fails=False)


def provide_checkpoint(words, workplace):
    """Have the checkpoint that a command names, of a training as short as can be."""
    args = make_parser().parse_args(memengine_arguments(words))
    for path in (getattr(args, 'checkpoint', None), getattr(args, 'resume', None)):
        if isinstance(path, str) and not Path(path).exists():
            short = ['memengine', 'train', args.config, '--max-iters', '2', '--work-dir', 'short']
            run_command(short, fails=False)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy('short/iter_2.pth', path)


def run_ranks(words, workplace):
    """Run a torchrun command on CPU; its port is a free one."""
    module = [sys.executable, '-m', 'torch.distributed.run', '--rdzv-backend=c10d']
    module += ['--rdzv-endpoint=localhost:0', *words[1:], '--max-iters', '2']
    done = subprocess.run(module, cwd=workplace, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert 'Stopped after iteration 2' in done.stdout + done.stderr


# ------------------------------------------------------------------ names in the text


def anchor(heading):
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r'[^\w\- ]', '', heading.strip().lower()).replace(' ', '-')


@pages(ALL)
def test_links(page):
    for target in re.findall(r'\]\(<?([^)>\s]+)>?\)', prose_of(page)):
        if '://' in target or target.startswith('mailto:'):
            continue
        path, _, fragment = target.partition('#')
        linked = (page.parent / path) if path else page
        assert linked.exists(), f'{target} does not exist'
        if fragment:
            headings = re.findall(r'^#+ (.*)$', linked.read_text(), re.M)
            assert fragment in map(anchor, headings), f'{linked.name} has no heading {fragment}'


@pages(ALL)
def test_files_in_the_text(page):
    rooms = [p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in ('work_dirs', 'build')]
    for code in INLINE.findall(prose_of(page)):
        if (
            re.fullmatch(r'[\w.-]+(/[\w.*-]+)*/?', code)
            and code.split('/')[0] in rooms
            and '/' in code
        ):
            assert any(ROOT.glob(code)) or 'docs/_build' in code, f'there is no {code}'


@pages(ALL)
def test_options_in_the_text(page):
    known = {*OTHER_OPTIONS}
    for command in make_parser()._subparsers._group_actions[0].choices.values():
        known |= {option for action in command._actions for option in action.option_strings}
    text = re.sub(r'^\| `--\w+` \|', '|', prose_of(page), flags=re.M)  # DINO's script has its own
    for code in INLINE.findall(text):
        for option in re.findall(r'(?<!\S)--[\w-]+', code):
            assert option in known, f'{option} is no option'


@pages(TESTED)
def test_names_in_the_text(page):
    """Dotted names of the package, and class names of whatever library, exist."""
    own = '\n'.join(block.text for block in blocks_of(page))
    for code in INLINE.findall(prose_of(page)):
        if re.fullmatch(r'memengine(\.\w+)+', code):
            assert resolves(code), f'there is no {code}'
        elif (
            re.fullmatch(r'(?=.*[a-z])([A-Z][A-Za-z0-9]*[A-Z][a-z0-9]*)', code) and code not in own
        ):
            assert is_class(code), f'there is no {code}'


def resolves(dotted):
    parts = dotted.split('.')
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module('.'.join(parts[:end]))
        except ImportError:
            continue
        return functools.reduce(lambda o, n: getattr(o, n, None), parts[end:], found) is not None
    return False


@functools.cache
def is_class(name):
    import torchvision.transforms.v2

    libraries = (
        builtins,
        torch,
        torch.nn,
        torch.optim,
        torch.utils.data,
        torchvision.transforms.v2,
    )
    libraries += (mmengine.evaluator, mmengine.hooks)
    return (
        any(hasattr(library, name) for library in libraries)
        or find_anywhere(name, 'memengine') is not None
        or re.search(rf'^class {name}\b', sources(), re.M) is not None
    )


# ------------------------------------------------------------------ DINO's tables

ORIGINAL_OPTIONS = """
arch patch_size out_dim norm_last_layer momentum_teacher use_bn_in_head warmup_teacher_temp
teacher_temp warmup_teacher_temp_epochs use_fp16 weight_decay weight_decay_end clip_grad
batch_size_per_gpu epochs freeze_last_layer lr warmup_epochs min_lr optimizer drop_path_rate
global_crops_scale local_crops_number local_crops_scale data_path output_dir saveckp_freq seed
num_workers dist_url local_rank
""".split()
RECIPES = {
    'ImageNet': 'configs/dino/dino_vit-small-p16_8xb64-100e_imagenet.py',
    'digits': 'configs/dino_vit.py',
    'photographs': 'configs/dino_vit_photographs.py',
}


def tables(page):
    """The tables of a page: lists of rows, a row a list of cells, the first row the heads."""
    rows = re.findall(r'((?:^\|.*\|\n)+)', prose_of(page), re.M)
    split = [
        [[c.strip() for c in line.strip('|').split('|')] for line in t.splitlines()] for t in rows
    ]
    return [[table[0], *table[2:]] for table in split]


def look_up(cfg, path):
    """(whether the config has an entry, or could have it; its value)."""
    node = cfg
    *parents, last = path.split('.')
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    if last in node:
        return True, node[last]
    found = find_anywhere(node['type'], 'memengine') if 'type' in node else None
    if found is None:
        return False, None
    names = arguments_of(found[1])
    default = inspect.signature(found[1]).parameters.get(last)
    return last in names.names or names.open, default and default.default


def test_every_option_of_the_original_script_is_a_setting():
    table = next(t for t in tables(ROOT / 'docs/dino.md') if t[0][0] == 'original option')
    assert [row[0].strip('`-') for row in table[1:]] == ORIGINAL_OPTIONS
    cfg = Config.fromfile(ROOT / RECIPES['ImageNet'])
    for option, settings in table[1:]:
        named = [
            code
            for code in INLINE.findall(settings)
            if re.fullmatch(r'[a-z_]\w*(\.\w+)+(=.*)?', code)
        ]
        for setting in named:
            path = setting.partition('=')[0]
            is_known = path.split('.')[0] == 'env_cfg' or look_up(cfg, path)[0]
            assert is_known, f'{option}: there is no {path}'
        assert named or option in ('`--output_dir`', '`--local_rank`'), f'{option} has no setting'


def test_what_the_quick_starts_change_is_what_their_configs_say():
    table = next(t for t in tables(ROOT / 'docs/dino.md') if t[0][1] == 'ImageNet')
    rows = [row for row in table[1:] if row[0].startswith('`')]
    assert len(rows) > 5
    for column, name in enumerate(table[0][1:4], start=1):
        cfg = Config.fromfile(ROOT / RECIPES[name])
        for row in rows:
            value = look_up(cfg, row[0].strip('`'))[1]
            assert str(value) in row[column], f'{row[0]}: {name} has {value}, not {row[column]}'
