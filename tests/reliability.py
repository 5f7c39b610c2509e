"""The table of what may go wrong in a run, from the tests that carry ``pytest.mark.fault``.

``python -m tests.reliability`` writes it into ``docs/reliability.md``, which
``tests/test_reliability.py`` compares. A mark says what goes wrong, what happens, and perhaps the
figure that is asserted.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / 'docs/reliability.md'
_HEAD = '| what goes wrong | what happens | figure | test |\n|---|---|---|---|'
_MARKERS = re.compile(r'(<!-- faults:begin .*?-->\n).*?(<!-- faults:end -->)', re.S)
SUBJECTS = {  # by the folder of the test; the first that fits
    'engine/checkpoint': 'Checkpoints',
    'engine/config': 'Configs',
    'engine/faults': 'Runs',
    'engine': 'Runs',
    'test_launching': 'Runs',
    'datasets': 'Data',
    'models': 'Models',
    'techniques': 'Techniques',
    '': 'Anything else',
}


class Fault(NamedTuple):
    """What goes wrong, what happens, the figure that is asserted, and the test."""

    fault: str
    outcome: str
    figure: str
    test: str


def faults_in(path):
    """The faults that a file of tests provokes."""
    tree = ast.parse(path.read_text())
    for test in ast.walk(tree):
        if not isinstance(test, ast.FunctionDef):
            continue
        for node in (inner for mark in test.decorator_list for inner in ast.walk(mark)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == 'pytest.mark.fault':
                words = [ast.literal_eval(argument) for argument in node.args]
                figure = words[2] if len(words) > 2 else ''
                yield Fault(*words[:2], figure, f'{path.relative_to(ROOT)}::{test.name}')


def subject(fault):
    """The heading under which a fault stands."""
    folder = fault.test.removeprefix('tests/')
    return next(name for start, name in SUBJECTS.items() if folder.startswith(start))


def table():
    """All faults, under their headings."""
    found = [fault for path in sorted(ROOT.glob('tests/**/*.py')) for fault in faults_in(path)]
    parts = []
    for name in dict.fromkeys(SUBJECTS.values()):
        rows = [fault for fault in found if subject(fault) == name]
        if rows:
            parts.append(f'\n## {name}\n\n{_HEAD}')
            parts += [f'| {r.fault} | {r.outcome} | {r.figure} | `{r.test}` |' for r in rows]
    return '\n'.join(parts) + '\n\n'


def filled():
    """The page with the table as the tests say it."""
    text = PAGE.read_text()
    assert _MARKERS.search(text), f'{PAGE} has no place for the table'
    return _MARKERS.sub(lambda match: match[1] + table() + match[2], text)


if __name__ == '__main__':
    PAGE.write_text(filled())
