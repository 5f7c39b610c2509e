# PYTHON_ARGCOMPLETE_OK
"""``python -m memengine``: the command line."""

import sys

from memengine.engine.cli.main import main

sys.exit(main())
