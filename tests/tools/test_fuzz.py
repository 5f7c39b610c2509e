"""The fuzz: a seed draws the same cases, a fault is found, and its script shows it by itself."""

import random
import subprocess
import sys

import pytest

from tests.docs_pages import ROOT

sys.path.insert(0, str(ROOT / 'tools'))

import fuzz
from fuzz_cases import OfProgram, Techniques
from fuzz_programs import draw_program

WRONG = Techniques(
    ('model.head.bias.register_hook(lambda gradient: 2 * gradient)',), 'plain_step', ()
)


def test_a_seed_draws_the_same_cases():
    first, again = ([fuzz.draw_case(3, n).script() for n in range(20)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 20


def test_a_fault_is_found_and_made_small(tmp_path):
    case = fuzz.made_smaller(OfProgram(draw_program(random.Random(2)), WRONG))
    assert fuzz.outcome_of(case).startswith('wrong')
    assert case.techniques.apply == WRONG.apply
    assert not case.program.calls
    path = tmp_path / 'case.py'
    path.write_text(case.script())
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert ran.returncode == 1 and 'wrong: AssertionError' in ran.stderr


@pytest.mark.slow
def test_random_cases_learn_what_the_plain_step_does(tmp_path):
    words = ['--minutes', '5', '--cases', '60', '--seed', '0', '--out', str(tmp_path)]
    assert fuzz.main(words) == 0
