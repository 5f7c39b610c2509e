"""Runs the tests that depend on versions, in a fresh environment for each torch and Python.

    python tools/matrix.py                              # all: hours, and a download for each torch
    python tools/matrix.py --torch 2.8.0 --python 3.12  # one

Needs ``uv``, which makes environments from its cache in seconds, and finds or fetches the Pythons.
The results stand in ``docs/versions.json``, a row for each pair; a run replaces its own rows and
the table of ``docs/versions.md``.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'tools/benchmarks'))

from measuring import fill_page, table  # noqa: E402

# torch, with what was made for it and pip would not choose; 'newest' is what pip chooses.
MADE_FOR = {
    '2.6.0': ('torchvision==0.21.0', 'torchao==0.10.0'),
    '2.8.0': ('torchvision==0.23.0', 'torchao==0.13.0'),
    '2.10.0': ('torchvision==0.25.0',),
    '2.12.0': ('torchvision==0.27.0',),
    '2.14.1': ('torchvision==0.29.1',),
    'newest': (),
}
PYTHONS = ('3.10', '3.12', '3.13')
# What reaches into torch, changes how it dispatches, or builds models; the rest is the same code
# on any version and is run by README's commands.
TESTS = (
    'tests/test_torch_private.py',
    'tests/techniques',
    'tests/memory',
    'tests/losses',
    'tests/engine',
    'tests/models',
)
ASKED = (
    'import platform, timm, torch; '
    'print(platform.python_version(), torch.__version__, timm.__version__)'
)
COUNTS = ('passed', 'failed', 'error', 'skipped')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pairs that are asked for, one after another; 1 if any of them failed."""
    parser = argparse.ArgumentParser(description='tests on several torch and Python')
    parser.add_argument('--torch', nargs='+', default=list(MADE_FOR), choices=MADE_FOR)
    parser.add_argument('--python', nargs='+', default=list(PYTHONS))
    parser.add_argument('--results', type=Path, default=ROOT / 'docs/versions.json')
    parser.add_argument('--page', type=Path, default=ROOT / 'docs/versions.md')
    args = parser.parse_args(argv)
    is_green = True
    for torch in args.torch:
        for python in args.python:
            row = run_tests(torch, python)
            print(json.dumps(row), flush=True)
            rows = json.loads(args.results.read_text()) if args.results.exists() else []
            args.results.write_text(json.dumps(with_row(rows, row), indent=1) + '\n')
            fill_page(args.page, 'versions', table(cells(with_row(rows, row))))
            is_green &= not row['failed'] + row['error'] and row['passed'] > 0
    return 0 if is_green else 1


def run_tests(torch: str, python: str) -> dict[str, Any]:
    """One fresh environment, and what the tests say in it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(['uv', 'venv', '-q', '--python', python, folder], check=True)
        there = {**os.environ, 'VIRTUAL_ENV': folder, 'UV_LINK_MODE': 'hardlink'}
        pins = [] if torch == 'newest' else [f'torch=={torch}', *MADE_FOR[torch]]
        install = ['uv', 'pip', 'install', '-q', '-e', f'{ROOT}[tests]']
        subprocess.run([*install, *pins], env=there, check=True)
        interpreter = str(Path(folder) / 'bin/python')
        versions = subprocess.run(
            [interpreter, '-c', ASKED], capture_output=True, text=True, check=True
        ).stdout.split()
        tested = subprocess.run(
            [interpreter, '-m', 'pytest', '-q', *TESTS], cwd=ROOT, capture_output=True, text=True
        )
    print(tested.stdout[-3000:], tested.stderr[-3000:], sep='\n', file=sys.stderr)
    last = tested.stdout.strip().splitlines()[-1]
    counts = {name: int(n) for n, name in re.findall(rf'(\d+) ({"|".join(COUNTS)})', last)}
    return {
        'asked': [torch, python],
        **dict(zip(('python', 'torch', 'timm'), versions, strict=True)),
        **{name: counts.get(name, 0) for name in COUNTS},
        'date': datetime.date.today().isoformat(),
    }


def with_row(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with a new one in the place of that of the same pair, in the table's order."""
    order = list(MADE_FOR)
    kept = [*(one for one in rows if one['asked'] != row['asked']), row]
    return sorted(
        kept, key=lambda one: (order.index(one['asked'][0]), int(one['asked'][1].split('.')[1]))
    )


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The page's table: a line for each pair that was run."""
    heads = ['torch', 'Python', 'timm', 'passed', 'failed', 'skipped', 'date']
    return [heads] + [
        [
            row['torch'].split('+')[0],
            row['python'],
            row['timm'],
            f'{row["passed"]:,}',
            str(row['failed'] + row['error']),
            str(row['skipped']),
            row['date'],
        ]
        for row in rows
    ]


if __name__ == '__main__':
    sys.exit(main())
