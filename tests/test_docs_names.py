"""What README.md and docs/ name exists: links, files, options, classes, DINO's settings."""

import builtins
import functools
import importlib
import inspect
import re

import mmengine.evaluator
import mmengine.fileio
import mmengine.hooks
import torch
import torchvision.transforms.v2
from mmengine.config import Config

from memengine.engine.cli.parser import make_parser
from memengine.engine.config.schema.types import arguments_of, find_anywhere
from tests.docs_pages import ALL, ROOT, TESTED, blocks_of, parametrize_pages, prose_of, sources

INLINE = re.compile(r'(?<!`)`([^`\n]+)`(?!`)')

# Options of other programs that prose may name.
OTHER_OPTIONS = {'--nproc_per_node', '--torch-backend', '--help'}
OTHER_OPTIONS |= {'--kills-only', '--minutes', '--seed', '--iterations', '--steps'}  # of tools
OTHER_OPTIONS |= {'--batch-size', '--rounds', '--rounds-of-deit', '--fresh'}


def anchor(heading):
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r'[^\w\- ]', '', heading.strip().lower()).replace(' ', '-')


@parametrize_pages(ALL)
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


def test_pages_of_techniques_open_with_four_answers():
    questions = ('What is it?', 'When do I use it?', 'How?', 'What does it cost?')
    pages = {*(ROOT / 'docs/techniques').glob('*.md')}
    for page in pages - {ROOT / f'docs/techniques/{name}.md' for name in ('index', 'composition')}:
        opening = page.read_text().split('\n\n')[1]
        assert tuple(re.findall(r'^- \*\*(.*?)\*\* \S', opening, re.M)) == questions, page.name


def test_what_others_have_is_here_with_a_page_or_a_reason():
    rows = re.findall(r'^\|.*\| (.+) \|$', (ROOT / 'docs/compared.md').read_text(), re.M)
    cells = [cell for cell in rows if cell != 'memengine' and not re.fullmatch('-+', cell)]
    assert len(cells) > 20
    for cell in cells:
        assert re.fullmatch(r'yes\b.*: \[\]\(.+\)|yes\b.* \(\[\]\(.+\)\)|no: .{30,}', cell), cell


@parametrize_pages(ALL)
def test_files_in_the_text(page):
    rooms = [p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in ('work_dirs', 'build')]
    for code in INLINE.findall(prose_of(page)):
        if (
            re.fullmatch(r'[\w.-]+(/[\w.*-]+)*/?', code)
            and code.split('/')[0] in rooms
            and '/' in code
        ):
            assert any(ROOT.glob(code)) or 'docs/_build' in code, f'there is no {code}'


@parametrize_pages(ALL)
def test_options_in_the_text(page):
    known = {*OTHER_OPTIONS}
    for command in make_parser()._subparsers._group_actions[0].choices.values():
        known |= {option for action in command._actions for option in action.option_strings}
    text = re.sub(r'^\| `--\w+` \|', '|', prose_of(page), flags=re.M)  # DINO's script has its own
    for code in INLINE.findall(text):
        for option in re.findall(r'(?<!\S)--[\w-]+', code):
            assert option in known, f'{option} is no option'


@parametrize_pages(TESTED)
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
    libraries = [builtins, torch, torch.nn, torch.optim, torch.utils.data]
    libraries += [torchvision.transforms.v2, mmengine.evaluator, mmengine.fileio, mmengine.hooks]
    return (
        any(hasattr(library, name) for library in libraries)
        or find_anywhere(name, 'memengine') is not None
        or re.search(rf'^class {name}\b', sources(), re.M) is not None
    )


# ------------------------------------------------------------------ DINO's tables

ORIGINAL_OPTIONS = (  # of main_dino.py, in its order
    'arch patch_size out_dim norm_last_layer momentum_teacher use_bn_in_head warmup_teacher_temp '
    'teacher_temp warmup_teacher_temp_epochs use_fp16 weight_decay weight_decay_end clip_grad '
    'batch_size_per_gpu epochs freeze_last_layer lr warmup_epochs min_lr optimizer drop_path_rate '
    'global_crops_scale local_crops_number local_crops_scale data_path output_dir saveckp_freq '
    'seed num_workers dist_url local_rank'
)
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
    assert ' '.join(row[0].strip('`-') for row in table[1:]) == ORIGINAL_OPTIONS
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


def test_what_quick_starts_reached_is_what_their_configs_state():
    page = (ROOT / 'docs/algorithms.md').read_text()
    rows = re.findall(
        r'^\| `(configs/\w+\.py)` \| (.+) \|$', page.partition('## Trained here')[2], re.M
    )
    assert sorted(name for name, _ in rows) == sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / 'configs').glob('*.py')
    )
    for name, row in rows:
        stated = (ROOT / name).read_text().partition('_base_')[0].split()
        for figure in re.findall(r'\d+\.\d', row):
            assert figure in stated, f'{name} does not state {figure}'
