"""Optimiser and gradient memory: bytes of state and gradients, distance from AdamW, operations.

A small ViT is trained for some steps by each optimiser, from the same weights on the same data.
What is counted depends on no timing; on a GPU torch's AdamW runs multi-tensor by default.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from memengine.memory.allocated import allocated_peak_bytes
from memengine.memory.ledger import blocks_of
from memengine.registry import OPTIMIZERS
from memengine.techniques.optimizer_memory.in_backward import step_in_backward

LR, STEPS = 1e-3, 20
MODEL = dict(model_name='vit_small_patch16_224', img_size=32, depth=1, num_classes=10)
QUICK = {**MODEL, 'depth': 2, 'embed_dim': 64, 'num_heads': 2}

# Way: optimiser, its settings, whether it steps inside backward.
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    'AdamW': ('AdamW', dict(foreach=False), False),
    'AdamW, multi-tensor': ('AdamW', dict(foreach=True), False),
    'AdamW in backward': ('AdamW', dict(foreach=False), True),
    'AdamWBf16': ('AdamWBf16', {}, False),
    'AdamWBf16 in backward': ('AdamWBf16', {}, True),
    'AdamW8bit': ('AdamW8bit', {}, False),
    'AdamW8bit in backward': ('AdamW8bit', {}, True),
    'AdamW4bit': ('AdamW4bit', {}, False),
}


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class LiveGradients:
    """The most bytes of gradients of a model's parameters that are alive at once."""

    def __init__(self, model: nn.Module) -> None:
        self.peak_bytes = 0
        self._storages: list[tuple[weakref.ref[Any], int]] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(self._count) for p in model.parameters()
        ]

    def _count(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        self._storages.append((weakref.ref(storage), storage.nbytes()))
        alive = sum(nbytes for storage, nbytes in self._storages if storage() is not None)
        self.peak_bytes = max(self.peak_bytes, alive)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Run:
    """One way of training, from the same start as all."""

    def __init__(self, way: str, model: Mapping[str, Any], device: torch.device) -> None:
        name, settings, self.in_backward = WAYS[way]
        torch.manual_seed(0)
        self.net = timm.create_model(**model).to(device)
        self.first = [p.detach().clone() for p in self.net.parameters()]
        self.optimizer: Optimizer = OPTIMIZERS.get(name)(
            self.net.parameters(), lr=LR, weight_decay=0.05, **settings
        )
        self.device = device

    def loss(self, seed: int) -> Tensor:
        """The loss of a batch that the seed makes."""
        torch.manual_seed(seed)
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        return nn.functional.cross_entropy(self.net(images.to(self.device)), labels.to(self.device))

    def update(self, loss: Tensor) -> None:
        """Backward and step."""
        with self._backward():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        if not self.in_backward:
            yield
            return
        with step_in_backward(self.optimizer):
            yield

    def moved(self) -> list[Tensor]:
        """The way of each parameter from the start."""
        return [p.detach() - q for p, q in zip(self.net.parameters(), self.first, strict=True)]

    def state_bytes(self) -> int:
        """Bytes of what the optimiser keeps, but for the number of its steps."""
        tensors = [
            value
            for state in self.optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, Tensor) and key != 'step'
        ]
        return sum({b.key: b.nbytes for t in tensors for b in blocks_of(t)}.values())


def operations(run: Run, seed: int) -> int:
    """Operations of an update, without those of backward."""

    def count(work: Callable[[Tensor], Any]) -> int:
        loss = run.loss(seed)
        with Operations() as counter:
            work(loss)
        return counter.count

    backward = count(Tensor.backward)
    run.optimizer.zero_grad()
    return count(run.update) - backward


def measure(way: str, model: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Train, and count; the way of the parameters is taken after ``STEPS`` steps."""
    run = Run(way, model, device)
    for seed in range(STEPS):
        run.update(run.loss(seed))
    facts: dict[str, Any] = {'moved': run.moved(), 'state_mib': run.state_bytes() / measuring.MIB}
    numbers = sum(p.numel() for p in run.net.parameters())
    facts['state_bytes_per_number'] = run.state_bytes() / numbers
    facts['parameters_mib'] = 4 * numbers / measuring.MIB
    facts['largest_mib'] = max(p.nbytes for p in run.net.parameters()) / measuring.MIB
    live = LiveGradients(run.net)
    run.update(run.loss(STEPS))
    live.remove()
    facts['gradients_mib'] = live.peak_bytes / measuring.MIB
    loss = run.loss(STEPS)
    facts['allocated_mib'] = allocated_peak_bytes(lambda: run.update(loss), device) / measuring.MIB
    facts['operations'] = operations(run, STEPS)
    return facts


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [
        [
            '',
            'state, bytes per parameter',
            'state, MiB',
            'gradients alive at once, MiB',
            'allocated by backward and step, MiB',
            'operations of an update',
            'from AdamW after 20 steps',
        ]
    ]
    for way, row in results['rows'].items():
        cells.append(
            [
                way,
                f'{row["state_bytes_per_number"]:.2f}',
                *(f'{row[key]:.1f}' for key in ('state_mib', 'gradients_mib', 'allocated_mib')),
                str(row['operations']),
                '–' if way == 'AdamW' else f'{row["distance"]:.2%}',
            ]
        )
    return {'optimizer_memory': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def plot(results: Mapping[str, Any], folder: Path) -> None:
    """State and gradients of each way, stacked on the parameters."""
    rows = results['rows']
    parts = {'parameters_mib': '#9a9a9a', 'state_mib': '#0b6bcb', 'gradients_mib': '#e09f3e'}
    with measuring.figure(folder / 'optimizer_memory.png', 8, 3.6) as figure:
        axes = figure.subplots()
        left = [0.0] * len(rows)
        for key, colour in parts.items():
            widths = [row[key] for row in rows.values()]
            axes.barh(list(rows), widths, left=left, color=colour, label=key.partition('_')[0])
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set(xlabel='MiB')
        axes.invert_yaxis()
        axes.legend(fontsize=9, frameon=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON and plot')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--device', default='cpu', help='where to run')
    parser.add_argument('--quick', action='store_true', help='a small model')
    args = parser.parse_args()
    device, model = torch.device(args.device), QUICK if args.quick else MODEL
    has_torchao = importlib.util.find_spec('torchao') is not None
    ways = [way for way in WAYS if has_torchao or 'bit' not in way]
    rows = {way: measure(way, model, device) for way in ways}
    reference = rows['AdamW']['moved']
    for row in rows.values():
        row['distance'] = measuring.relative_error(row['moved'], reference)
    for row in rows.values():
        del row['moved']
    packages = ('torchao',) if has_torchao else ()
    results = {'run': measuring.where(device, packages), 'model': model, 'rows': rows}
    measuring.publish(results, 'optimizer_memory', tables, args.out, args.page)
    plot(results, args.out)


if __name__ == '__main__':
    main()
