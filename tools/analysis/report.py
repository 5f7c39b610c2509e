"""Draw the curves of a work dir again: ``python tools/analysis/report.py WORK_DIR``."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memengine.visualization.report import write_report


def main() -> int:
    """Write WORK_DIR/report; one line on standard error when that cannot be done."""
    parser = argparse.ArgumentParser(description=write_report.__doc__.split('\n')[0])
    parser.add_argument('work_dir', metavar='WORK_DIR', help='the work dir of a run')
    try:
        folder = write_report(parser.parse_args().work_dir)
    except (FileNotFoundError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == '__main__':
    sys.exit(main())
