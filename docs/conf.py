"""Sphinx configuration; ``make docs`` builds the pages into ``docs/_build/html``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mmengine.hooks import Hook

import memengine

project = 'memengine'
author = 'the memengine authors'
copyright = author
release = version = memengine.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
exclude_patterns = ['_build']
html_theme = 'furo'
html_title = 'memengine'

myst_heading_anchors = 3  # what [text](page.md#heading) points to

autodoc_default_options = {'members': True, 'show-inheritance': True}
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def skip_callbacks(app, what, name, obj, skip, options):
    """Leave out the methods of hooks that MMEngine calls: their classes say what they do."""
    return True if what == 'class' and name in vars(Hook) and callable(obj) else None


def setup(app):
    app.connect('autodoc-skip-member', skip_callbacks)
