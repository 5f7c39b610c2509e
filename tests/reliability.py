"""The table of what may go wrong in a run, from the tests that carry ``pytest.mark.fault``.

``python -m tests.reliability`` writes it into ``docs/reliability.md``, which
``tests/test_reliability.py`` compares. A mark says what goes wrong, what happens, and perhaps the
figure that is asserted.
"""

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / 'docs/reliability.md'
_HEAD = '| what goes wrong | what happens | figure | test |\n|---|---|---|---|'
TRIALS = ROOT / 'docs/reliability_soak.json'
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


def marks_in(path, name):
    """The words of each ``pytest.mark.NAME`` in a file, and the test that carries it."""
    tree = ast.parse(path.read_text())
    for test in ast.walk(tree):
        if not isinstance(test, ast.FunctionDef):
            continue
        for node in (inner for mark in test.decorator_list for inner in ast.walk(mark)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f'pytest.mark.{name}':
                words = [ast.literal_eval(argument) for argument in node.args]
                yield words, f'{path.relative_to(ROOT)}::{test.name}'


def faults_in(path):
    """The faults that a file of tests provokes."""
    for words, test in marks_in(path, 'fault'):
        yield Fault(*words[:2], words[2] if len(words) > 2 else '', test)


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
            parts += [
                f'| {r.fault[:1].upper()}{r.fault[1:]} | {r.outcome} | {r.figure} | `{r.test}` |'
                for r in rows
            ]
    return '\n'.join(parts) + '\n\n'


def trials():
    """What trainings that were broken off at random have ended as, by command."""
    rows = ['| command | date | faults | of them | losses that differ |', '|---|---|---|---|---|']
    for trial in json.loads(TRIALS.read_text()).values():
        if 'faults' in trial:
            kinds = Counter()
            for fault, count in trial['faults'].items():
                kinds[fault.partition(',')[0]] += count
            run, count = trial['run'], sum(kinds.values())
            found = ', '.join(f'{number} {kind}' for kind, number in sorted(kinds.items()))
            cells = (f'`{run["command"]}`', run['date'], count, found, trial['different_losses'])
            rows.append('| ' + ' | '.join(map(str, cells)) + ' |')
    return '\n'.join(rows) + '\n'


def leaks():
    """What a step leaves behind, with each technique."""
    left = json.loads(TRIALS.read_text())['leaks']
    rows = [
        '| with | tensors | bytes of tensors a step | resident bytes a step |',
        '|---|---|---|---|',
    ]
    for name, found in left['left'].items():
        cells = (found['tensors'], found['tensor_bytes_a_step'], found['resident_bytes_a_step'])
        rows.append(f'| {name} | ' + ' | '.join(f'{cell:g}' for cell in cells) + ' |')
    return '\n'.join(rows) + '\n'


def filled():
    """The page with its tables as tests and trials say them."""
    text = PAGE.read_text()
    for name, content in (('faults', table), ('trials', trials), ('leaks', leaks)):
        block = re.compile(rf'(<!-- {name}:begin .*?-->\n).*?(<!-- {name}:end -->)', re.S)
        assert block.search(text), f'{PAGE} has no place for the table of {name}'
        text = block.sub(lambda match, content=content: match[1] + content() + match[2], text)
    return text


if __name__ == '__main__':
    PAGE.write_text(filled())
