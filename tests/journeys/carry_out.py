"""A journey, carried out in an empty folder."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.docs_pages import ROOT, TUTORIALS, assert_prints, blocks_of, file_name

JOURNEYS = [*TUTORIALS, *sorted(Path(__file__).parent.glob('*.sh'))]
NOT_HERE = 77  # the status of a script that lacks a package which nobody promised


def carry_out(journey: Path, folder: Path, environment: Mapping[str, str]) -> str | None:
    """Carry a journey out.

    Args:
        journey: A tutorial or a script.
        folder: An empty one.
        environment: Of its commands.

    Returns:
        None; or what is lacking, where a script says that a package is.

    Raises:
        AssertionError: Where a command ends with another status, or prints something else.
    """
    if journey.suffix == '.sh':
        status, said = run(['bash', '-euo', 'pipefail', str(journey)], folder, environment)
        assert status in (0, NOT_HERE), f'{journey.name}: status {status}\n{said[-4000:]}'
        return said if status == NOT_HERE else None
    for words, given, expected in steps_of(journey, folder):
        status, said = run(words, folder, environment, given)
        assert bool(status) == ('error:' in expected), f'{words}: status {status}\n{said[-4000:]}'
        assert_prints(expected, said)
    return None


def run(
    words: list[str], folder: Path, environment: Mapping[str, str], given: str | None = None
) -> tuple[int, str]:
    """The status of a command, and what it prints."""
    done = subprocess.run(
        words,
        cwd=folder,
        env={**environment, 'CHECKOUT': str(ROOT)},
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1000,
    )
    return done.returncode, done.stdout


def steps_of(page: Path, folder: Path) -> Iterator[tuple[list[str], str | None, str]]:
    """Commands of a tutorial, what each is given, and what it prints; its files are written.

    Python that is run in blocks one after the other is one program.
    """
    program, printed = '', ''
    for block in [*blocks_of(page), None]:
        if block is not None and block.kind == 'python' and not file_name(block.text):
            program += block.text
        elif block is not None and block.kind == 'text':
            printed += block.text
        else:
            if program:
                yield ['python', '-'], program, printed
            program, printed = '', ''
        if block is None:
            return
        if block.kind == 'console':
            for part in re.split(r'^\$ ', block.text, flags=re.M)[1:]:
                command, expected = part.split('\n', 1)
                yield ['bash', '-c', command], None, expected
        elif file := (block.kind == 'python' and file_name(block.text)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(block.text, encoding='utf-8')
        else:
            assert block.kind in ('python', 'text'), f'line {block.line}: what is this block?'
