"""``python``, ``memengine`` and ``torchrun`` that find torch imported already.

Importing torch and what models need takes some eight seconds of every command and tells nothing, so
tests of many commands begin here: each is a fork of one process in which it is done. Arguments,
environment, folder, standard streams, signals and status are the command's own, and so is its
process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from memengine.technique import description

IMPORTED = (
    'matplotlib.pyplot',
    'memengine.datasets',
    'memengine.engine',
    'memengine.engine.cli.after_training',
    'memengine.engine.cli.commands',
    'memengine.evaluation',
    'memengine.models',
    'memengine.visualization',
    'sklearn.datasets',
    'timm',
    'torch.distributed.run',
    'torchvision.transforms.v2',
)
PROGRAMS = ('memengine', 'python', 'torchrun')
# The program on the path: hands all that is its own to the process that waits, and its end back.
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys

waiting = socket.socket(socket.AF_UNIX)
waiting.connect({address!r})
request = dict(words=[{name!r}, *sys.argv[1:]], folder=os.getcwd(), environment=dict(os.environ))
socket.send_fds(waiting, [b' '], [0, 1, 2])
waiting.sendall(json.dumps(request).encode())
waiting.shutdown(socket.SHUT_WR)
process = int(waiting.recv(20))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: os.kill(process, number))
status = int(waiting.recv(20))
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextlib.contextmanager
def warm_programs(folder: Path) -> Iterator[Path]:
    """The folder of the programs, for ``PATH``, as long as the context lasts."""
    address = str(folder / 'waiting')
    for name in PROGRAMS:
        program = folder / name
        program.write_text(PROGRAM.format(python=sys.executable, address=address, name=name))
        program.chmod(0o755)
    command = [sys.executable, '-m', 'tests.journeys.warm', address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout.readline() == 'ready\n'
        yield folder
        waiting.terminate()


def wait_for_commands(address: str) -> NoReturn:
    """Fork for each command that is asked for."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or each fork would copy what it looks through
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print('ready', flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the status of what watches
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(connection)
        connection.close()


def become(connection: socket.socket) -> NoReturn:
    """Fork once more: this process watches and ends, the other one is the command."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(b''.join(iter(lambda: connection.recv(1 << 16), b'')))
    process = os.fork()
    if process:
        connection.sendall(b'%-20d' % process)
        _, status = os.waitpid(process, 0)
        connection.sendall(b'%-20d' % os.waitstatus_to_exitcode(status))
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request['folder'])
    os.environ.clear()
    os.environ.update(request['environment'])
    sys.path[1:1] = filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))
    description._find.cache_clear()  # in packages that are only on this path, too
    try:
        carry_out(*request['words'])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: what was imported in vain is not taken down piece by piece


def carry_out(name: str, *arguments: str) -> NoReturn:
    """The command itself."""
    if name != 'python':
        module = 'memengine.engine.cli.main' if name == 'memengine' else 'torch.distributed.run'
        sys.argv = [name, *arguments]
        sys.exit(importlib.import_module(module).main())
    sys.argv = list(arguments)
    if arguments[0] == '-':
        sys.path[0] = ''
        names = {'__name__': '__main__'}
        exec(compile(sys.stdin.read(), '<stdin>', 'exec'), names)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name='__main__')
    sys.exit()


if __name__ == '__main__':
    wait_for_commands(sys.argv[1])
