"""Plans beside settings made by hand: in no more bytes than a setting takes, which is faster?

Each setting's step is predicted, and a plan made for a budget of as many bytes. Both steps are then
carried out in turn, in one process with one thread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import measuring
import plans
import torch
from mmengine.logging import MMLogger

from memengine.engine.cli.plan import said
from memengine.engine.config.planning import Planner, budget_for
from memengine.engine.config.step_of_config import first_batch, step_of
from memengine.memory import TrainingStep, predict
from memengine.memory.planning import Cost, rates_of

SETTLING_STEPS = 3  # in which techniques measure and decide


BLOCKS = ['activation_checkpointing=[blocks]']
RECOMPUTED = ['recomputed_activations=True']


def in_slices(wrapper: str, name: str, size: int, kept: int = 0) -> list[str]:
    options = [f'optim_wrapper.type={wrapper}OptimWrapper', f'optim_wrapper.{name}={size}']
    return [*options, f'optim_wrapper.keep_graph={kept}'] if kept else options


def additive(size: int) -> list[list[str]]:
    """Settings of a step whose loss is additive, in slices of a size and of half of it."""
    large, small = (in_slices('Accumulation', 'micro_batch_size', n) for n in (size, size // 2))
    return [large, small, BLOCKS, RECOMPUTED, [*large, *BLOCKS]]


def coupled(size: int) -> list[list[str]]:
    """Settings of a step in whose loss samples meet, in slices of a size and of half of it."""
    cache = 'GradCache', 'chunk_size'
    large, small = in_slices(*cache, size), in_slices(*cache, size // 2)
    return [large, in_slices(*cache, size, kept=2), small, BLOCKS, RECOMPUTED]


SETTINGS = {
    'classifier, ViT': additive(32),
    'SimCLR, ViT': coupled(16),
    'DINO, ViT': additive(16),
    'CLIP, two towers': coupled(32),
}


def compared(name: str, settings: Sequence[Sequence[str]], repeats: int) -> Iterator[dict]:
    """Each setting of a step by hand, its plan, and how long both take."""
    step = plans.STEPS[name]
    planner = Planner(plans.config_of(step))
    for options in settings:
        by_hand = built(step, options)
        hand_made = Cost.of(predict(by_hand))
        found = planner.find(budget_for(hand_made.peak_bytes))
        row = {'name': name, 'options': options, 'bytes': hand_made.peak_bytes, 'planned': None}
        if found.chosen is None:
            yield row
            continue
        planned = said(planner.options(found.chosen.plan)).split()
        steps = {'hand-made': settled(by_hand), 'planned': settled(built(step, planned))}
        seconds = measuring.time_in_turn(
            {way: (one.model, one.run) for way, one in steps.items()},
            repeats,
            torch.device('cpu'),
        )
        yield {
            **row,
            'planned': planned,
            'planned_bytes': found.chosen.cost.peak_bytes,
            'predicted_time': found.chosen.seconds / hand_made.seconds(rates_of('cpu')),
            'time': measuring.ratio(seconds['planned'], seconds['hand-made']),
        }


def built(step: plans.Step, options: Sequence[str]) -> Any:
    """What builds a config's step."""
    cfg = plans.config_of(step, *options)
    return step_of(cfg, first_batch(cfg))


def settled(build: Any) -> TrainingStep:
    """A step that has been carried out, and has decided what it decides at first."""
    step = build()
    for _ in range(SETTLING_STEPS):
        step.run()
    return step


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, what it comes to, and where it comes from."""
    cells = [
        ['step', 'by hand', 'predicted, MiB', 'plan', 'predicted', 'time, predicted', 'measured']
    ]
    for row in results['rows']:
        hand, planned = (
            ' '.join(f'`{option}`' for option in row[key] or []) for key in ('options', 'planned')
        )
        sizes = [
            f'{row[key] / 2**20:.1f}' if key in row else '–' for key in ('bytes', 'planned_bytes')
        ]
        ratios = [f'{row[key]:.2f} ×' if key in row else '–' for key in ('predicted_time', 'time')]
        cells.append([row['name'], hand, sizes[0], planned or 'none', sizes[1], *ratios])
    times = [row['time'] for row in results['rows'] if 'time' in row]
    summary = (
        f'{sum(time <= 1.03 for time in times)} of {len(results["rows"])} plans take at most 1.03 '
        f'times what the setting does; median {statistics.median(times):.2f} times, the slowest '
        f'{max(times):.2f}.'
    )
    return {
        'plans_beside_hand_made': f'{measuring.table(cells)}\n\n{summary}\n\n'
        + measuring.origin(results)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--only', nargs='+', choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument('--repeats', type=int, default=9, help='rounds of timing')
    args = parser.parse_args()
    MMLogger.get_current_instance().setLevel('ERROR')
    torch.set_num_threads(1)
    rows = [row for name in args.only for row in compared(name, SETTINGS[name], args.repeats)]
    results = {'run': measuring.where(torch.device('cpu')), 'rows': rows}
    measuring.publish(results, 'plans_beside_hand_made', tables, args.out, args.page)


if __name__ == '__main__':
    main()
