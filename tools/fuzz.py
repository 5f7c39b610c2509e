"""Tries random models and techniques against the plain step until the time is up.

    python tools/fuzz.py --minutes 60 --seed 1 --out fuzz_failures

A case that learns something else, crashes, or is refused without a word on what to set is made
smaller while it still fails, printed, and written as a script that runs by itself. The same seed
draws the same cases.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fuzz_cases import Case, draw_program_case, draw_zoo_case
from fuzz_configs import draw_config_case
from same_training import ROOT, end_after

sys.path.insert(0, str(ROOT))

from memengine.technique import techniques
from tests.leaks import in_a_process

SECONDS = 120  # of CPU that a case may take
_MOST_TRIALS = 150  # in which a case is made smaller
_SHARES = {draw_program_case: 12, draw_zoo_case: 1, draw_config_case: 3}


def outcome_of(case: Case) -> str:
    """What becomes of a case, in a process of its own."""
    try:
        return in_a_process(_run, case.script())
    except AssertionError:
        return f'wrong: its process died, or took more than {SECONDS} s of CPU'


def _run(script: str) -> str:
    end_after(SECONDS)
    logging.disable(logging.WARNING)
    warnings.simplefilter('ignore')
    known = {'__name__': 'case'}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(script, 'case', 'exec'), known)
    except Exception as error:
        return known.get('result', f'unfit: {type(error).__name__}: {error}')
    return known['result']


def draw_case(seed: int, number: int) -> Case:
    """A case by its place, whatever was drawn before it."""
    draw = random.Random(f'{seed} {number}')
    return draw.choices(list(_SHARES), list(_SHARES.values()))[0](draw)


def made_smaller(case: Case) -> Case:
    """A case that fails, with less in it, and fails."""
    trials = 0
    smaller = case.smaller()
    while trials < _MOST_TRIALS and (less := next(smaller, None)) is not None:
        trials += 1
        if outcome_of(less).startswith('wrong'):
            case, smaller = less, less.smaller()
    return case


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz; say what was found, and give how many cases failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--minutes', type=float, default=5.0, help='how long')
    parser.add_argument('--cases', type=int, help='how many at most')
    parser.add_argument('--seed', type=int, default=0, help='of all that is drawn')
    parser.add_argument('--first', type=int, default=0, help='number of the first case')
    parser.add_argument('--out', type=Path, help='folder for what fails')
    args = parser.parse_args(argv)
    techniques()  # imported once, not by each case
    start, number, failures = time.monotonic(), args.first, 0
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    end = float('inf') if args.cases is None else args.first + args.cases
    while time.monotonic() < start + 60 * args.minutes and number < end:
        case = draw_case(args.seed, number)
        result = outcome_of(case)
        word, _, reason = result.partition(':')
        counts[f'{case.kind}: {word}'] += 1
        if word in ('unfit', 'refused'):
            reasons[f'{word}: {reason[:90]}'] += 1
        if word == 'wrong':
            failures += 1
            case = made_smaller(case)
            script = f'# Seed {args.seed}, case {number}: {outcome_of(case)}\n{case.script()}'
            print(script, flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f'seed{args.seed}_case{number}.py').write_text(script)
        number += 1
    for reason, count in reasons.most_common(12):
        print(f'{count:5} {reason}')
    minutes = round((time.monotonic() - start) / 60, 1)
    found = {'seed': args.seed, 'minutes': minutes, 'cases': number - args.first}
    print(json.dumps({**found, 'failures': failures, **dict(sorted(counts.items()))}))
    return failures


if __name__ == '__main__':
    sys.exit(min(main(), 1))
