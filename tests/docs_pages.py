"""The pages that the tests of the documentation read, and the blocks in them."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = sorted(p for p in (ROOT / 'docs').rglob('*.md') if '_build' not in p.parts)
TUTORIALS = [page for page in DOCS if page.parent.name == 'tutorials']  # tests/test_journeys.py
TESTED = [ROOT / 'README.md', *(page for page in DOCS if page not in TUTORIALS)]
ALL = [*TESTED, *TUTORIALS, ROOT / 'AGENTS.md', ROOT / 'CHANGELOG.md']
FENCE = re.compile(r'^```([^\n`]*)\n(.*?)^```[ \t]*$', re.M | re.S)


def name_of(page):
    return str(page.relative_to(ROOT))


def parametrize_pages(pages):
    """Pages as what a test is about."""
    import pytest  # which `python -m tests.journeys` does without

    return pytest.mark.parametrize('page', pages, ids=name_of)


@dataclass
class Block:
    """A fenced block: its kind as the page says it, its text, and the line that it begins in."""

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


def file_name(text):
    """The file that a block is the content of, from its first line."""
    match = re.match(r'# ([\w./-]+\.py)\n', text)
    return match and match[1]


def assert_prints(expected, output):
    """Each expected line is one of the output, in this order."""
    lines = [' '.join(line.split()) for line in re.sub(r'\x1b\[[\d;]*m', '', output).splitlines()]
    at = 0
    for line in filter(str.strip, expected.splitlines()):
        pattern = '.*'.join(map(re.escape, ' '.join(line.split()).split('...')))
        found = next((i for i in range(at, len(lines)) if re.fullmatch(pattern, lines[i])), None)
        assert found is not None, f'{line!r} is not printed; there is:\n' + '\n'.join(lines[-80:])
        at = found + 1


def prose_of(page):
    """A page without its fenced blocks and comments."""
    text = page.read_text(encoding='utf-8')
    return re.sub(r'<!--.*?-->', '', FENCE.sub('', text), flags=re.S)


@functools.cache
def sources():
    """The package's source, as one text."""
    return '\n'.join(p.read_text() for p in (ROOT / 'memengine').rglob('*.py'))
