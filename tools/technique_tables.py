"""Write the tables of techniques in README.md and docs from their descriptions.

``python tools/technique_tables.py``
"""

import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memengine.technique import techniques  # noqa: E402

MARKERS = re.compile(r'(<!-- techniques:begin .*?-->\n).*?(<!-- techniques:end -->)', re.S)
HEADS = {
    'README.md': ('technique', 'what it saves', 'gradients', 'how'),
    'docs/techniques/index.md': (
        'technique',
        'use it when',
        'what it saves',
        'price',
        'gradients',
        'how',
    ),
}


def row(technique, page):
    """The cells of a technique, by the heads of the columns."""
    folder = posixpath.relpath('docs/techniques', posixpath.dirname(page) or '.')
    link = posixpath.normpath(f'{folder}/{technique.page or f"{technique.key}.md"}')
    call = f'; in any loop: `{technique.call}`' if technique.call else ''
    return {
        'technique': f'[{technique.title}]({link})',
        'use it when': technique.use_when,
        'what it saves': technique.saves,
        'price': technique.price,
        'gradients': technique.exactness,
        'how': f'`{technique.typed}`{call}',
    }


def table(page):
    """The table of a page."""
    heads = HEADS[page]
    found = sorted(techniques().values(), key=lambda technique: technique.title.lower())
    rows = [[row(technique, page)[head] for head in heads] for technique in found]
    lines = [heads, ['---'] * len(heads), *rows]
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines) + '\n'


def filled(page):
    """A page with its table as the descriptions say it."""
    text = (ROOT / page).read_text()
    assert MARKERS.search(text), f'{page} has no place for the table'
    return MARKERS.sub(lambda match: match[1] + table(page) + match[2], text)


def main():
    """Write the pages."""
    for page in HEADS:
        (ROOT / page).write_text(filled(page))


if __name__ == '__main__':
    main()
