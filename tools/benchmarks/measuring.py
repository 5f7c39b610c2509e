"""What the benchmarks share: steps timed in turn, where they ran, files, one look of plots."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.scale import LogScale
from matplotlib.ticker import NullLocator
from torch import Tensor, nn

from memengine.memory import SavedBytes

ROOT = Path(__file__).parents[2]
MIB = 2**20
Step = Callable[[], object]

HOLLOW = dict(linestyle='', markersize=11, markerfacecolor='none', markeredgewidth=2)

# One colour and mark for each of the compared, in all plots.
LOOKS: dict[str, dict[str, Any]] = {
    'memengine': dict(color='#0b6bcb', marker='o'),
    'plain': dict(color='#4d4d4d', marker='s'),
    'in chunks': dict(color='#9a9a9a', marker='.', linestyle='--'),
    'GradCache': dict(color='#d1495b', marker='^', **HOLLOW),
    'sentence-transformers': dict(color='#e09f3e', marker='v', **HOLLOW),
    'issue #269': dict(color='#d1495b', marker='^', **HOLLOW),
    'one forward per crop': dict(color='#e09f3e', marker='v', **HOLLOW),
}
STYLE = {
    'axes.grid': True,
    'axes.spines.right': False,
    'axes.spines.top': False,
    'axes.titlesize': 11,
    'figure.constrained_layout.use': True,
    'font.size': 11,
    'grid.alpha': 0.3,
    'legend.frameon': False,
    'lines.linewidth': 2,
    'lines.markersize': 7,
    'savefig.dpi': 130,
}


# ------------------------------------------------------------------ measuring


class Forwards:
    """Counts a module's forward passes, and the rows that go through it."""

    def __init__(self, module: nn.Module) -> None:
        self.calls, self.rows = 0, 0
        self._handle = module.register_forward_hook(self._count)

    def _count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls, self.rows = self.calls + 1, self.rows + len(output)

    def remove(self) -> None:
        self._handle.remove()


def step_facts(
    step: Step, model: nn.Module, batch: Sequence[Tensor], device: torch.device
) -> dict[str, Any]:
    """Peak bytes, exact number of forwards, and the gradient of one step; not its time."""
    model.zero_grad()
    forwards = Forwards(model)
    with SavedBytes(model, *batch) as saved:
        step()
    forwards.remove()
    facts: dict[str, Any] = {
        'saved_mib': saved.peak_bytes / MIB,
        'forwards': forwards.calls,
        'rows': forwards.rows,
        'gradient': [p.grad.clone() for p in model.parameters() if p.grad is not None],
    }
    if device.type == 'cuda':
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        facts['allocated_mib'] = (torch.cuda.max_memory_allocated(device) - before) / MIB
    return facts


def relative_error(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Norm of the difference by norm of the reference, over all parameters together."""
    difference = [a - b for a, b in zip(gradient, reference, strict=True)]
    norms = [
        torch.stack(torch._foreach_norm(list(some))).norm() for some in (difference, reference)
    ]
    return float(norms[0] / norms[1])


def time_in_turn(
    steps: Mapping[str, tuple[nn.Module, Step]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each step, in rounds: CPU seconds of this process, or wall seconds on a GPU.

    In a round each step is taken once, in every second one in the reverse order, so that what
    changes slowly on the machine changes alike for all.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if device.type == 'cpu' else time.perf_counter
    for number in range(repeats):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            model, step = steps[name]
            model.zero_grad()
            wait(device)
            start = clock()
            step()
            wait(device)
            seconds[name].append(clock() - start)
        print(f'round {number + 1} of {repeats}', file=sys.stderr, flush=True)
    return seconds


def wait(device: torch.device) -> None:
    """Let the device finish."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))


def import_peer(module: str, folders: Sequence[str]) -> ModuleType | None:
    """A peer's module from some folders or as installed, or None; never one of these scripts.

    ``package.module`` in a folder is loaded by itself, so that what its package needs besides
    need not be there.
    """
    for folder in folders:
        file = Path(folder, *module.split('.')).with_suffix('.py')
        if '.' in module and file.exists():
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
            return loaded
    here = Path(__file__).parent.resolve()
    path = [entry for entry in sys.path if Path(entry).resolve() != here]
    before, sys.path[:] = list(sys.path), [*folders, *path]
    try:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module)
        return None
    finally:
        sys.path[:] = before


def peer_version(distribution: str, folders: Sequence[str]) -> str:
    """Version of a distribution in some folders or as installed."""
    for found in importlib.metadata.distributions(name=distribution, path=[*folders, *sys.path]):
        return found.version
    return 'unknown'


# ------------------------------------------------------------------ results


def where(device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, versions and date of a run, and the command that it was."""
    command = [str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]
    if '--peers' in command:  # folders of whoever ran it say nothing
        start = command.index('--peers')
        rest = [word for word in command[start + 1 :] if word.startswith('--')]
        command[start + 1 : command.index(rest[0]) if rest else len(command)] = ['PATH']
    gpu = torch.cuda.get_device_name(device) if device.type == 'cuda' else None
    modules = [importlib.import_module(name) for name in ('torch', 'timm', *packages)]
    return {
        'command': 'python ' + shlex.join(command),
        'date': datetime.date.today().isoformat(),
        'machine': gpu or f'{_processor()}, {torch.get_num_threads()} thread(s)',
        'load_average': round(os.getloadavg()[0], 1),
        'versions': {m.__name__: getattr(m, '__version__', 'unknown') for m in modules},
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        names = re.findall(r'^model name\s*: (.*)$', Path('/proc/cpuinfo').read_text(), re.M)
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def origin(results: Mapping[str, Any]) -> str:
    """Where figures come from and the command that makes them, for a page."""
    run = results['run']
    versions = ', '.join(f'{name} {version}' for name, version in run['versions'].items())
    command = re.sub(r' (?=--)', ' \\\n    ', run['command'])
    load = f'load average {run["load_average"]}'
    return f'{run["machine"]}, {load}; {versions}; {run["date"]}:\n\n```bash\n{command}\n```'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, heads first, as Markdown."""
    lines = [f'| {" | ".join(row)} |' for row in rows]
    return '\n'.join([lines[0], '|---' * len(rows[0]) + '|', *lines[1:]])


def publish(
    results: Mapping[str, Any],
    name: str,
    tables: Callable[[Mapping[str, Any]], Mapping[str, str]],
    folder: Path,
    page: Path | None,
) -> None:
    """Write results to ``folder/name.json``, print their tables, and put these into a page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results)
    rounded = json.loads(text, parse_float=lambda number: float(f'{float(number):.5g}'))
    (folder / f'{name}.json').write_text(json.dumps(rounded, indent=1) + '\n')
    for mark, text in tables(rounded).items():
        print(f'{text}\n')
        if page is not None:
            fill_page(page, mark, text)


def fill_page(page: Path, name: str, text: str) -> None:
    """Put a text between the marks ``<!-- name:begin -->`` and ``<!-- name:end -->`` of a page.

    Raises:
        ValueError: When the page does not have these marks, once each.
    """
    marks = re.compile(rf'(<!-- {name}:begin [^>]*-->\n).*?(<!-- {name}:end -->)', re.S)
    filled, count = marks.subn(lambda match: f'{match[1]}{text}\n{match[2]}', page.read_text())
    if count != 1:
        raise ValueError(f'{page} has {count} places for {name}, expected one')
    page.write_text(filled)


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure in the common look, of a size in inches, written to ``path`` at the end."""
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(width, height))
        yield drawn
        drawn.savefig(path)


def doubling(axes: Axes, *names: str) -> None:
    """Logarithmic axes, ``'x'`` or ``'y'``, with ticks at powers of two, written as numbers."""
    for name in names:
        axes.set(**{f'{name}scale': LogScale(getattr(axes, f'{name}axis'), base=2)})
        axis = getattr(axes, f'{name}axis')
        axis.set_major_formatter('{x:g}')
        axis.set_minor_locator(NullLocator())
