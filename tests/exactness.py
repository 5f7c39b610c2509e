"""What each exact technique assumes, notices and refuses, from tests with ``pytest.mark.edge``.

``python -m tests.exactness`` writes it into ``docs/where_exactness_ends.md``, which
``tests/test_where_exactness_ends.py`` compares. A mark names a technique by its key, says what
becomes of what the code around it does, and what that is.
"""

import re

from memengine.technique import techniques
from tests.reliability import ROOT, marks_in

PAGE = ROOT / 'docs/where_exactness_ends.md'
OUTCOMES = {  # in this order
    'exact': 'exact',
    'refused': 'refused',
    'assumed': 'assumed',
    'unnoticed': '**not noticed**',
}
GUARD = 'verify_exactness'


def edges():
    """Technique, outcome, sentence and test of each mark."""
    for path in sorted(ROOT.glob('tests/**/*.py')):
        for words, test in marks_in(path, 'edge'):
            assert words[1] in OUTCOMES, f'{test}: {words[1]} is none of {", ".join(OUTCOMES)}'
            yield (*words, test)


def table():
    """A section for each technique that has such tests, and one for the guard."""
    found, parts = list(edges()), []
    titles = {key: technique.title for key, technique in techniques().items()}
    for key, title in {**titles, GUARD: 'The guard itself'}.items():
        rows = [edge for edge in found if edge[0] == key]
        if rows:
            name = title[:1].upper() + title[1:]
            parts.append(f'\n### {name}\n\n| what happens | that is | test |\n|---|---|---|')
        for outcome, words in OUTCOMES.items():
            for _, kind, said, test in rows:
                if kind == outcome:
                    parts.append(f'| {said} | {words} | `{test}` |')
    return '\n'.join(parts) + '\n\n'


def filled():
    """The page with its tables as the tests say them."""
    block = re.compile(r'(<!-- edges:begin .*?-->\n).*?(<!-- edges:end -->)', re.S)
    text = PAGE.read_text()
    assert block.search(text), f'{PAGE} has no place for its tables'
    return block.sub(lambda match: match[1] + table() + match[2], text)


if __name__ == '__main__':
    PAGE.write_text(filled())
