"""The tables of README.md and docs are what the descriptions say."""

import importlib

import pytest

from tests.docs_pages import ROOT


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools')
    return importlib.import_module('technique_tables')


def test_the_pages_hold_what_the_descriptions_say(tables):
    for page in tables.HEADS:
        assert tables.filled(page) == (ROOT / page).read_text(), (
            'run python tools/technique_tables.py'
        )


def test_links_lead_to_the_pages_of_the_techniques(tables):
    found = tables.techniques()
    cells = tables.row(found['tiled_loss'], 'README.md')
    assert 'docs/techniques/disco.md#tiles' in cells['technique']
    cells = tables.row(found['data_parallel'], 'docs/techniques/index.md')
    assert cells['technique'] == '[data parallel](../launching.md)'
