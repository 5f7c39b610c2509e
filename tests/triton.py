"""Kernels of Triton in tests: by its interpreter on a CPU, and compiled for GPUs not at hand."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec('triton') is None,
    reason="Triton is not installed: it comes with torch's builds for CUDA, on Linux",
)


def run_interpreted(file: str) -> None:
    """Run a file of tests where Triton interprets: it asks for that when it is imported."""
    run = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-n', '0', '-p', 'no:cacheprovider', file],
        env={**os.environ, 'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def compile_for_gpu(
    kernel: Any, types: dict[str, str], settings: dict[str, Any], capability: int
) -> Any:
    """As far as machine code, for which no GPU is needed.

    Args:
        kernel: Of ``triton.jit``.
        types: Of what it takes, by name; may name more.
        settings: What it is compiled for, and how.
        capability: 80 for an A100.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types[name] for name in names if name in types}
    constants: dict[Any, Any] = {name: settings[name] for name in names if name in settings}
    options = {name: value for name, value in settings.items() if name not in names}
    if 'constexprs' in inspect.signature(ASTSource).parameters:
        signature = {name: types.get(name, 'constexpr') for name in names}
        constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget('cuda', capability, 32), options=options)
    assert compiled.asm['cubin']
    return compiled
