"""Train a model from a config: ``python tools/train.py CONFIG``; see ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memengine.engine.cli.main import main

if __name__ == '__main__':
    sys.exit(main(['train', *sys.argv[1:]]))
