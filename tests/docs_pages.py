"""The pages that the tests of the documentation read, and the blocks in them."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = sorted(p for p in (ROOT / 'docs').rglob('*.md') if '_build' not in p.parts)
TUTORIALS = [page for page in DOCS if page.parent.name == 'tutorials']  # tests/test_tutorials.py
TESTED = [ROOT / 'README.md', *(page for page in DOCS if page not in TUTORIALS)]
ALL = [*TESTED, *TUTORIALS, ROOT / 'AGENTS.md', ROOT / 'CHANGELOG.md']
FENCE = re.compile(r'^```([^\n`]*)\n(.*?)^```[ \t]*$', re.M | re.S)


def name_of(page):
    return str(page.relative_to(ROOT))


parametrize_pages = functools.partial(pytest.mark.parametrize, 'page', ids=name_of)


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


def prose_of(page):
    """A page without its fenced blocks and comments."""
    text = page.read_text(encoding='utf-8')
    return re.sub(r'<!--.*?-->', '', FENCE.sub('', text), flags=re.S)


@functools.cache
def sources():
    """The package's source, as one text."""
    return '\n'.join(p.read_text() for p in (ROOT / 'memengine').rglob('*.py'))
