"""What is promised of versions is what is tested: bounds, constraints of CI, the page's table."""

import importlib.util
import json

import pytest
from packaging.requirements import Requirement

from tests.docs_pages import ROOT


def requirements(name):
    lines = (ROOT / f'requirements/{name}.txt').read_text().splitlines()
    found = [Requirement(line) for line in lines if line and line[0] != '#']
    return {one.name: one.specifier for one in found}


def promised():
    files = ('runtime', 'optional', 'tests')
    bounds = {name: bound for file in files for name, bound in requirements(file).items()}
    tools = ('mypy', 'ruff')  # which CI runs in its newest environment only
    return {name: bound for name, bound in bounds.items() if name not in tools}


def test_every_requirement_has_a_lower_bound_and_none_an_upper_one():
    for name, bound in promised().items():
        assert [one.operator for one in bound] == ['>='], f'{name}{bound}'


def test_the_lowest_versions_are_those_that_are_promised():
    lowest = {name: next(iter(pin)).version for name, pin in requirements('lowest').items()}
    assert lowest.keys() == promised().keys()
    for name, bound in promised().items():
        at_least = next(iter(bound)).version.split('.')
        assert lowest[name].split('.')[: len(at_least)] == at_least, f'{name}{bound}'


@pytest.mark.parametrize('name', ['middle', 'newest'])
def test_constraints_keep_what_is_promised(name):
    for package, pin in requirements(name).items():
        assert promised()[package].contains(next(iter(pin)).version)


@pytest.fixture
def matrix():
    spec = importlib.util.spec_from_file_location('matrix', ROOT / 'tools/matrix.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_was_run(matrix):
    rows = json.loads((ROOT / 'docs/versions.json').read_text())
    assert matrix.table(matrix.cells(rows)) in (ROOT / 'docs/versions.md').read_text()
    assert not any(row['failed'] + row['error'] for row in rows)


def test_a_row_replaces_that_of_the_same_pair(matrix):
    rows = [{'asked': ['newest', '3.12']}, {'asked': ['2.8.0', '3.13'], 'passed': 1}]
    rows = matrix.with_row(rows, {'asked': ['2.8.0', '3.10']})
    rows = matrix.with_row(rows, {'asked': ['2.8.0', '3.13'], 'passed': 2})
    assert [row['asked'] for row in rows] == [
        ['2.8.0', '3.10'],
        ['2.8.0', '3.13'],
        ['newest', '3.12'],
    ]
    assert rows[1]['passed'] == 2


def test_all_that_the_matrix_runs_is_there(matrix):
    assert all((ROOT / name).exists() for name in matrix.TESTS)
