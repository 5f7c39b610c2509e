"""Test a checkpoint: ``python tools/test.py CONFIG CHECKPOINT``; see ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memengine.engine.cli.main import main

if __name__ == '__main__':
    sys.exit(main(['test', *sys.argv[1:]]))
