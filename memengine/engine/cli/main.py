"""The command line: ``memengine train``, ``test`` and the smaller commands.

Torch and MMEngine are imported only once there is something for them to do, so that help and
wrong usage answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pickle
import select
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from memengine.engine.cli.parser import AFTER_TRAINING, make_parser
from memengine.engine.config.before_torch.check import check_text
from memengine.engine.config.error import ConfigError
from memengine.engine.faults.signals import (
    Interrupted,
    exit_status,
    raise_interrupted,
    stop_signals_handled_by,
)

if TYPE_CHECKING:
    from mmengine.config import Config

_ON_CONFIG = ('train', 'test', 'data', 'predict', 'measure', 'memory', 'plan')
_STDOUT = 1
_TRIES_TO_IMPORT = 30  # a tenth of a second apart
_RANK_VARIABLES = ('RANK', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0, 1 after an error, 74 where checkpoints cannot be written; after a signal
        that asked to stop 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP) or 75 (SIGUSR1, SIGUSR2);
        141 when whoever read the output has gone (``| head``). Wrong usage exits with 2.
    """
    parser = make_parser()
    if '_ARGCOMPLETE' in os.environ:  # set by the shell when it completes a line
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if args.command in ('replay', *_ON_CONFIG):
        if args.local_rank is not None:
            os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
        # Last, so that nothing that is installed is hidden by a file of the user's.
        sys.path += [os.getcwd(), str(Path(args.config or args.file).resolve().parent)]
    elif args.command in AFTER_TRAINING:
        sys.path += [os.getcwd(), str(Path(args.config or args.run).resolve().parent)]
    command = _Command(args, sys.argv[1:] if argv is None else argv)
    try:
        with stop_signals_handled_by(raise_interrupted):
            command.execute()
            sys.stdout.flush()  # or Python does it, when nothing can be said about it any more
    except KeyboardInterrupt as interrupt:
        command.print_error(command.interrupt_message(interrupt))
        return exit_status(interrupt)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE  # as the shell has it of tools that end by the signal
        command.report_error(error)
        return getattr(error, 'exit_status', 1)
    return 0


class _Command:
    """One command, and how it speaks to the user."""

    def __init__(self, args: argparse.Namespace, given: Sequence[str]) -> None:
        self.args = args
        self.given = given  # what ``args`` were read from
        self.cfg: Config | None = None

    def execute(self) -> None:
        """Do what the command line asks for."""
        _limit_thread_spinning()
        if self.args.command == 'techniques':
            from memengine.engine.cli.techniques import describe, list_techniques

            print(describe(self.args.name) if self.args.name else list_techniques())
            return
        # Where torch is there already, nothing is gained, and techniques of one's own may be, too.
        if self.args.command in _ON_CONFIG and 'torch' not in sys.modules:
            check_text(self.args.config, self.args.cfg_options)
        import_yapf()
        from memengine.engine.cli import commands

        args = self.args
        end = '\n' if self._rank() in (None, '0') else ''
        if args.command == 'convert':
            print(commands.convert(args.source, args.target))
        elif args.command == 'verify':
            for line in commands.verify(args.path):
                print(line)
        elif args.command == 'replay':
            print(commands.replay(args), end=end)
        elif args.command in AFTER_TRAINING:
            from memengine.engine.cli.after_training import read_run, run_after

            self.cfg = read_run(args)
            print(run_after(self.cfg, args.command), end=end)
        else:
            self.cfg = commands.read_config(args)
            if sentence := commands.run_command(args, self.cfg):
                print(sentence)

    def print_error(self, text: str) -> None:
        """Print to stderr; with several ranks the rank comes first."""
        rank = self._rank()
        who = 'memengine' if rank is None else f'memengine [rank {rank}]'
        print(f'{who}: {text}', file=sys.stderr, flush=True)

    def _rank(self) -> str | None:
        """This process's rank, if there are several."""
        launcher = getattr(self.args, 'launcher', None) or (self.cfg or {}).get('launcher', 'none')
        if launcher == 'none':
            return None
        return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)

    def interrupt_message(self, interrupt: KeyboardInterrupt) -> str:
        """What a signal that asked to stop is answered with."""
        work_dir = Path((self.cfg or {}).get('work_dir', ''))
        by_signal = isinstance(interrupt, Interrupted) and interrupt.signal != signal.SIGINT
        sentence = f'interrupted by {interrupt}' if by_signal else 'interrupted'
        if self.args.command != 'train' or not (work_dir / 'last_checkpoint').is_file():
            return sentence
        if self._rank() is not None:
            last = Path((work_dir / 'last_checkpoint').read_text())
            return f'{sentence}; start again with --resume to go on from {work_dir / last.name}'
        # All of it: without its settings another run would go on. The last --resume holds.
        resume = [] if self.args.resume in (True, 'auto') else ['--resume']
        return f'{sentence}; go on with: {shlex.join(["memengine", *self.given, *resume])}'

    def report_error(self, error: Exception) -> None:
        """Say what went wrong: in a sentence, with ``--debug`` below the traceback."""
        if self.args.debug:
            traceback.print_exception(error)
        if isinstance(error, ConfigError):
            count = len(error.problems)
            heading = [f'{count} problems in the config'] if count > 1 else []
            self.print_error('error: ' + '\n  '.join([*heading, *error.problems]))
            return
        from memengine.engine.cli.failure import explain, explain_lost_connection
        from memengine.engine.faults.ranks import RankError, lost_connection

        if isinstance(error, RankError):
            self.print_error(f'error: {error}')
            return
        if lost_connection(error):
            self.print_error(f'error: {explain_lost_connection(error, self.cfg)}')
            return
        self.print_error(f'error: {explain(error, self.cfg)}')
        if not self.args.debug:
            log = _log_traceback(error) or self._write_traceback(error)
            self.print_error(
                f'run again with --debug for the traceback{f" (it is in {log})" if log else ""}'
            )

    def _write_traceback(self, error: Exception) -> str | None:
        """Write the traceback to a file of this rank's, as only rank 0 has a log file."""
        rank, work_dir = self._rank(), Path((self.cfg or {}).get('work_dir', ''))
        if rank is None or not work_dir.is_dir():
            return None
        path = work_dir / f'error_rank{rank}.txt'
        with suppress(OSError):  # a full disk may be the very error, which has its own status
            path.write_text(''.join(traceback.format_exception(error)))
            return str(path)
        return None


def import_yapf() -> None:
    """Import yapf, as MMEngine does, while another process may be the first that ever has.

    That one renames its cache before it has written all of it (yapf 0.43, ``Grammar.dump``), so
    that ranks that start in a new environment may read a part.

    Raises:
        RuntimeError: When it stays cut off, as after a kill.
    """
    for _ in range(_TRIES_TO_IMPORT):
        try:
            importlib.import_module('yapf')
            return
        except (EOFError, pickle.UnpicklingError):
            time.sleep(0.1)
    from platformdirs import user_cache_dir  # as yapf does

    raise RuntimeError(
        'yapf, which MMEngine imports, was broken off while it wrote its cache: remove the folder '
        + user_cache_dir('YAPF', 'Google')
    )


def _nobody_reads() -> bool:
    """Whether the output's reader has gone; what is left of it then goes nowhere."""
    output = select.poll()
    output.register(_STDOUT, 0)
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return True


def _limit_thread_spinning() -> None:
    """Have torch's threads spin for a moment only when they wait; to be called before torch loads.

    A thread that waits for the others spins for milliseconds by default (GNU's OpenMP). Where
    others use the cores too, it takes the core from the very thread that it waits for, and a step
    takes many times as long (measured on two busy cores: 0.3-1.1 s instead of 0.12 s). A thirtieth
    of the default costs nothing on cores that are free. The user's own setting goes first.
    """
    if not os.environ.keys() & {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'}:
        os.environ['GOMP_SPINCOUNT'] = '10000'


def _log_traceback(error: Exception) -> Path | None:
    """Write the traceback to the run's log file, if there is one already."""
    from mmengine.logging import MMLogger

    if not MMLogger._instance_dict:
        return None
    from memengine.engine.cli.console import shortened, to_log_file

    text = ''.join(traceback.format_exception(error))
    path = to_log_file(MMLogger.get_current_instance(), text, logging.ERROR)
    return path and shortened(path)
