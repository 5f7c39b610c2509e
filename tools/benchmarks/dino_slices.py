"""DINO's step in slices: bytes saved for backward against time, beside the known recipes.

The student's part of a step (forward of all crops, loss, backward; no teacher, no optimiser, which
are the same for all) is carried out as in DINO's training script, by the recipe of its issue #269,
with one forward per crop, and in slices, as they are and with recomputed activations. The weights
are the same and the steps run in turn, in one process. The first three have the head of the script,
with torch's weight norm, and its loss.

    python tools/benchmarks/dino_slices.py --out docs/benchmarks \
        --page docs/techniques/accumulation.md
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from measuring import LOOKS, Step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from memengine.losses import DINOLoss
from memengine.models import DINOHead
from memengine.techniques import dino_step, recompute_activations

FULL = dict(
    batch_size=8,
    crop_sizes=[224] * 2 + [96] * 8,
    out_dim=65536,
    hidden_dim=2048,
    depth=12,
    micro_batch_sizes=[8, 4, 3, 2, 1.5, 1.25, 1],
    repeats=8,
)
QUICK = dict(
    batch_size=2,
    crop_sizes=[64] * 2 + [32] * 4,
    out_dim=512,
    hidden_dim=64,
    depth=2,
    micro_batch_sizes=[2, 1],
    repeats=1,
)
STUDENT_TEMP, TEACHER_TEMP = 0.1, 0.04

# Names of the steps that are compared with ours, as they stand in results and plots.
SCRIPT = "plain, DINO's script"
PLAIN = 'plain, memengine'
RECIPE = 'issue #269'
PER_CROP = 'one forward per crop'
RECOMPUTED = ', recomputed'


class Student(nn.Module):
    """Backbone and head; crops of one size go through the backbone together."""

    def __init__(self, depth: int, out_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.backbone = timm.create_model(
            'vit_tiny_patch16_224', num_classes=0, dynamic_img_size=True, depth=depth
        )
        self.head = DINOHead(self.backbone.num_features, out_dim, hidden_dim=hidden_dim)

    def forward(self, *crops: Tensor) -> Tensor:
        """Crops [B, C, h, w], of one size or several, to logits [crops * B, K]."""
        sizes = dict.fromkeys(crop.shape for crop in crops)
        groups = [[crop for crop in crops if crop.shape == size] for size in sizes]
        return self.head(torch.cat([self.backbone(torch.cat(group)) for group in groups]))

    def with_torch_weight_norm(self) -> Student:
        """A copy with the last layer of DINO's script."""
        other, last = copy.deepcopy(self), self.head.last_layer
        linear = nn.Linear(*last.weight_v.T.shape, bias=False, device=last.weight_v.device)
        linear.weight = nn.Parameter(F.normalize(last.weight_v.detach()))
        other.head.last_layer = weight_norm(linear)
        lengths = other.head.last_layer.parametrizations.weight
        lengths.original0.requires_grad_(False)
        lengths.original1.data.copy_(last.weight_v)
        return other


class Task:
    """A student, crops and teacher outputs, and the ways to carry the step out."""

    def __init__(self, settings: Mapping[str, Any], device: torch.device) -> None:
        torch.manual_seed(0)
        self.batch_size, self.out_dim = settings['batch_size'], settings['out_dim']
        self.student = Student(settings['depth'], self.out_dim, settings['hidden_dim']).to(device)
        self.scripts_student = self.student.with_torch_weight_norm()
        self.recomputing = copy.deepcopy(self.student).train()
        recompute_activations(self.recomputing)
        self.crops = [
            torch.randn(self.batch_size, 3, size, size, device=device)
            for size in settings['crop_sizes']
        ]
        self.teacher_output = torch.randn(2 * self.batch_size, self.out_dim, device=device)

    def steps(self, micro_batch_sizes: list[float]) -> dict[str, tuple[Student, Step]]:
        """Each step by its name, with the student that it trains."""
        theirs = {SCRIPT: self.script, RECIPE: self.recipe, PER_CROP: self.per_crop}
        steps: dict[str, tuple[Student, Step]] = {
            name: (self.scripts_student, step) for name, step in theirs.items()
        }
        steps[PLAIN] = self.student, self.plain
        for student, how in ((self.student, ''), (self.recomputing, RECOMPUTED)):
            for size in micro_batch_sizes:
                steps[f'slices of {size:g}{how}'] = student, partial(self.slices, student, size)
        return steps

    # ------------------------------------------------------------------ as others do it

    def scripts_loss(self, logits: Tensor, crops: list[int], views: list[int]) -> Tensor:
        """Share of some crops' pairs with some views of the teacher: pair by pair."""
        teacher = (self.teacher_output / TEACHER_TEMP).softmax(dim=-1).chunk(2)
        total = logits.new_zeros(())
        for view in views:
            for crop, rows in zip(crops, (logits / STUDENT_TEMP).chunk(len(crops)), strict=True):
                if crop != view:
                    entropy = -(teacher[view] * rows.log_softmax(dim=-1)).sum(dim=-1)
                    total = total + entropy.mean()
        return total / (2 * len(self.crops) - 2)

    def script(self) -> None:
        """Crops of one size in a forward, the head on all, one backward."""
        logits = self.scripts_student(*self.crops)
        self.scripts_loss(logits, list(range(len(self.crops))), [0, 1]).backward()

    def recipe(self) -> None:
        """A forward and a backward for each pair of a teacher's view and another crop."""
        for view in (0, 1):
            for index, crop in enumerate(self.crops):
                if index != view:
                    self.scripts_loss(self.scripts_student(crop), [index], [view]).backward()

    def per_crop(self) -> None:
        """A forward and a backward for each crop."""
        for index, crop in enumerate(self.crops):
            self.scripts_loss(self.scripts_student(crop), [index], [0, 1]).backward()

    # ------------------------------------------------------------------ as it is done here

    def loss(self) -> DINOLoss:
        """A loss whose centre has seen nothing yet."""
        loss = DINOLoss(self.out_dim, len(self.crops), TEACHER_TEMP, TEACHER_TEMP, 0, 1)
        return loss.to(self.teacher_output.device)

    def plain(self) -> None:
        self.loss()(self.student(*self.crops), self.teacher_output, 0).backward()

    def slices(self, student: Student, micro_batch_size: float) -> None:
        dino_step(student, self.crops, self.teacher_output, self.loss(), 0, micro_batch_size)


def measure(settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Bytes, forwards, gradient error and time of every step."""
    task = Task(settings, device)
    steps = task.steps(settings['micro_batch_sizes'])
    batch = [*task.crops, task.teacher_output]
    rows = {
        name: measuring.step_facts(step, student, batch, device)
        for name, (student, step) in steps.items()
    }
    seconds = measuring.time_in_turn(steps, settings['repeats'], device)
    reference = rows[SCRIPT]['gradient']
    for name, row in rows.items():
        row['gradient_error'] = measuring.relative_error(row.pop('gradient'), reference)
        row['seconds'] = seconds[name]
        row['time_to_script'] = measuring.ratio(seconds[name], seconds[SCRIPT])
        row['time_to_plain'] = measuring.ratio(seconds[name], seconds[PLAIN])
    return {'run': measuring.where(device), 'settings': dict(settings), 'rows': rows}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a page, by name."""
    images = len(results['settings']['crop_sizes']) * results['settings']['batch_size']
    heads = ['step', 'saved, MiB', "time, DINO's script = 1", 'time, plain here = 1']
    heads += ['student forwards', 'times each crop goes through']
    cells = [heads]
    for name, row in results['rows'].items():
        cells.append(
            [
                name.replace('slices of', '`micro_batch_size`'),
                f'{row["saved_mib"]:.1f}',
                f'{row["time_to_script"]:.2f}',
                f'{row["time_to_plain"]:.2f}',
                str(row['forwards']),
                f'{row["rows"] / images:g}',
            ]
        )
    return {'dino_slices': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def plot(results: Mapping[str, Any], folder: Path) -> None:
    """Time against bytes, one point a step."""
    rows = results['rows']
    ours = {name: row for name, row in rows.items() if name.startswith('slices of')}
    recomputed = [ours.pop(name) for name in list(ours) if name.endswith(RECOMPUTED)]
    looks = {SCRIPT: 'plain', RECIPE: RECIPE, PER_CROP: PER_CROP}
    with measuring.figure(folder / 'dino_slices.png', 7, 4.2) as figure:
        axes = figure.subplots()
        for name, look in looks.items():
            row = rows[name]
            axes.plot(
                row['saved_mib'],
                row['time_to_script'],
                label=name,
                **{'linestyle': '', **LOOKS[look]},
            )
        points = [
            (row['saved_mib'], row['time_to_script']) for row in [rows[PLAIN], *ours.values()]
        ]
        axes.plot(*zip(*points, strict=True), label='memengine, in slices', **LOOKS['memengine'])
        points_recomputed = [(row['saved_mib'], row['time_to_script']) for row in recomputed]
        axes.plot(
            *zip(*points_recomputed, strict=True),
            label='memengine, in slices, recomputed',
            **{**LOOKS['memengine'], 'color': '#2a9d8f', 'marker': 'D'},
        )
        for text, point in zip(['all at once', *ours], points, strict=True):
            axes.annotate(
                text.replace('slices of ', ''),
                point,
                xytext=(0, -14),
                textcoords='offset points',
                ha='center',
                fontsize=9,
            )
        axes.set(
            ylim=(0, None),
            xlabel='saved for backward at the peak, MiB',
            ylabel="time of a step, DINO's script = 1",
        )
        measuring.doubling(axes, 'x')
        axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON and plot')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--quick', action='store_true', help='a size that takes seconds')
    parser.add_argument('--repeats', type=int, help='rounds in which each step is timed once')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'))
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = dict(QUICK if args.quick else FULL)
    settings['repeats'] = args.repeats or settings['repeats']
    results = measure(settings, args.device)
    measuring.publish(results, 'dino_slices', tables, args.out, args.page)
    plot(results, args.out)


if __name__ == '__main__':
    main()
