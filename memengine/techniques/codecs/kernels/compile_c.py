"""Kernels in C, compiled for the processor at hand by the compiler that is there."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ['compiled']

# Sums and products are rounded one by one, as torch's operations round them.
_FLAGS = '-std=c11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math'
_COMPILERS = ('cc', 'gcc', 'clang')
_SECONDS = 120


def compiled(source: Path) -> ctypes.CDLL:
    """The functions of a file in C.

    Compiled anew in each process: a file that is kept would have to be known to be of this source,
    this processor and nobody else.

    Args:
        source: The file.

    Raises:
        FileNotFoundError: When there is no compiler: neither what ``CC`` says, nor cc, gcc, clang.
        OSError: When it fails, or what it has made cannot be loaded.

    Cost: half a second.
    """
    command = shlex.split(os.environ.get('CC', '')) or list(filter(shutil.which, _COMPILERS))[:1]
    if not command:
        raise FileNotFoundError('no C compiler: set CC, or install cc, gcc or clang')
    with tempfile.TemporaryDirectory(prefix='memengine-') as folder:
        library = Path(folder, source.with_suffix('.so').name)
        how = *_FLAGS.split(), '-shared', '-fPIC', '-pthread', '-o', str(library), str(source)
        ran = subprocess.run(
            [*command, *how], capture_output=True, text=True, check=False, timeout=_SECONDS
        )
        if ran.returncode:
            raise OSError(f'{command[0]} cannot compile {source.name}: {ran.stderr.strip()}')
        return ctypes.CDLL(str(library))
