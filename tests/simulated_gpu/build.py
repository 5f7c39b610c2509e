"""Compiles the simulated runtime for the torch that is installed, once for each of its versions."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / 'sources'
DRIVER, RUNTIME, KERNELS = 'libcuda.so.1', 'libruntime.so', 'kernels.so'
_FLAGS = ['g++', '-O1', '-shared', '-fPIC', '-std=c++20', f'-I{SOURCES}/headers']


def why_not() -> str | None:
    """Why there can be no simulated device here, in a sentence; None where there can."""
    cuda = runpy.run_path(str(_torch() / 'version.py'))['cuda']
    if cuda is None or int(cuda.split('.')[0]) < 13:
        return f'the simulated GPU needs a torch for CUDA 13 or later, this one is for {cuda}'
    if _runtime_headers() is None:
        return "the simulated GPU needs the headers of pip's CUDA runtime, which are not installed"
    if shutil.which('g++') is None:
        return 'the simulated GPU needs g++, which is not installed'
    return None


def build() -> Path:
    """The folder of the three libraries, compiled if nobody has yet (about half a minute).

    Raises:
        RuntimeError: With what the compiler said.
    """
    folder = _cache() / _key()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for command in _commands():
            result = subprocess.run(command, cwd=made, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f'{" ".join(command)}\n{result.stderr}')
        if not folder.exists():  # else another process was faster
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _commands() -> list[list[str]]:
    torch = _torch()
    cuda = f'-I{_runtime_headers()}'
    libraries = [f'-l{name}' for name in ('torch', 'torch_cpu', 'c10', 'c10_cuda', 'torch_cuda')]
    return [
        [*_FLAGS, f'{SOURCES}/driver.cpp', f'-Wl,-soname,{DRIVER}', '-o', DRIVER],
        [*_FLAGS, cuda, f'{SOURCES}/runtime.cpp', '-o', RUNTIME, '-ldl'],
        [
            *_FLAGS,
            cuda,
            f'-I{torch}/include',
            f'-I{torch}/include/torch/csrc/api/include',
            f'-I{sysconfig.get_path("include")}',
            f'{SOURCES}/kernels.cpp',
            '-o',
            KERNELS,
            f'-L{torch}/lib',
            *libraries,
            '-ltorch_python',
        ],
    ]


def _torch() -> Path:
    """Where it lies; it is not imported before the runtime is."""
    spec = importlib.util.find_spec('torch')
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _runtime_headers() -> Path | None:
    found = _torch().parent.glob('nvidia/*/include/cuda_runtime_api.h')
    return next((path.parent for path in found), None)


def _cache() -> Path:
    base = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(base, 'memengine', 'simulated_gpu')


def _key() -> str:
    version = runpy.run_path(str(_torch() / 'version.py'))['__version__']
    digest = hashlib.sha256(str(_torch()).encode())
    for path in sorted(SOURCES.rglob('*.*')):
        digest.update(path.read_bytes())
    return f'{version}-{sysconfig.get_config_var("SOABI")}-{digest.hexdigest()[:12]}'
