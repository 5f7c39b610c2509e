"""``python -m tests.journeys [--fresh] [NAME ...]``: each journey, and whether it arrives."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from tests.docs_pages import ROOT
from tests.journeys import __doc__ as about
from tests.journeys.carry_out import JOURNEYS, carry_out

PEERS = ['accelerate', 'lightning', 'transformers']  # of the users with a trainer


def fresh(folder: Path) -> Path:
    """The programs of a new environment, in which README's first command has installed us."""
    venv.create(folder, with_pip=True)
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    install = re.search(r'^pip install [^&\n]*', readme, re.M)[0].strip()
    for command in (install, ' '.join(['pip install', *PEERS])):
        print(f'$ {command}', flush=True)
        subprocess.run(f'{folder}/bin/{command} -q', shell=True, check=True, cwd=ROOT)
    return folder / 'bin'


def verdict(journey: Path, folder: Path, environment: dict[str, str]) -> str:
    """Whether a journey arrives; what went wrong is printed."""
    folder.mkdir()
    try:
        lacking = carry_out(journey, folder, environment)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(error)
        return 'FAILED'
    return f'not here: {lacking.strip()}' if lacking else 'arrived'


def main() -> int:
    """Status 1 unless each has arrived."""
    parser = argparse.ArgumentParser(
        'python -m tests.journeys', None, about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--fresh', action='store_true', help='in a new environment')
    parser.add_argument('names', nargs='*', metavar='NAME', help='only these, such as own_images')
    args = parser.parse_args()
    chosen = [it for it in JOURNEYS if not args.names or it.stem in args.names]
    verdicts = []
    with tempfile.TemporaryDirectory() as work:
        programs = fresh(Path(work, 'venv')) if args.fresh else Path(sys.executable).parent
        environment = {**os.environ, 'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}'}
        for journey in chosen:
            begin_s = time.monotonic()
            verdicts.append(verdict(journey, Path(work, journey.stem), environment))
            passed_s = time.monotonic() - begin_s
            print(f'{journey.stem}: {verdicts[-1]}, after {passed_s:.0f} s', flush=True)
    print(f'{verdicts.count("arrived")} of {len(chosen)} arrived')
    return int(verdicts.count('arrived') < len(chosen))


if __name__ == '__main__':
    sys.exit(main())
