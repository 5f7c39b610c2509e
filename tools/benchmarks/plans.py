"""Plans of shipped configs and of models from outside: predicted and measured beside the budget.

Each config is planned for shares of what its step takes as it is. A plan is predicted and measured
in a process of its own, with one thread: by the kernel's high-water mark; a plan of several ranks
by ``memengine measure``. Rows that are in the results already are kept, so that a run that is
broken off goes on. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import memory_prediction
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger

from memengine._torch_private.distributed import pretended_ranks
from memengine.engine.cli.commands import read_config
from memengine.engine.cli.parser import make_parser
from memengine.engine.cli.plan import said
from memengine.engine.config.planning import Planner, budget_for, usable_bytes
from memengine.engine.config.step_of_config import first_batch, step_of
from memengine.memory import map_blocks_singly, measure, predict

DEIT = "type='TimmBackbone',model_name='deit_tiny_patch16_224',img_size=112,in_chans=1,depth=4"
CONVNEXT = "type='TimmBackbone',model_name='convnextv2_atto',in_chans=1,depths=[1,1,3,1]"
MSN = (
    "type='TransformersImage',model_name='vit_msn',pretrained=False,config=dict(num_channels=1,"
    'image_size=112,hidden_size=192,num_hidden_layers=4,num_attention_heads=3,intermediate_size=768)'
)
CROP = 'train_dataloader.dataset.pipeline.0'
RGB = (  # a pipeline, for models that want three channels
    "[dict(type='torchvision/RandomResizedCrop',size=112),"
    "dict(type='torchvision/Grayscale',num_output_channels=3),dict(type='torchvision/PILToTensor'),"
    "dict(type='torchvision/ToDtype',dtype='float32',scale=True),dict(type='PackInputs')]"
)
TEXT = ('model.text.width=256', 'model.text.depth=4')


class Step(NamedTuple):
    """A config, what is set in it, how many processes carry it out, shares that leave a plan."""

    config: str
    options: tuple[str, ...]
    ranks: int
    shares: tuple[float, ...]


def _step(
    config: str,
    size: int,
    batch: int,
    backbone: str,
    *options: str,
    ranks: int = 1,
    shares: tuple[float, ...] = (0.9, 0.6, 0.4),
) -> Step:
    """A shipped config with another backbone, on its digits enlarged to ``size`` pixels."""
    place = 'image' if config in ('clip_vit', 'siglip_vit') else 'backbone'
    views = '.views.0.pipeline.0' if config in ('simclr_vit', 'dino_vit') else ''
    settings = (
        f'model.{place}=dict(_delete_=True,{backbone})',
        f'{CROP}{views}.size={size}',
        f'train_dataloader.batch_size={batch}',
        *options,
    )
    return Step(config, settings, ranks, shares)


STEPS: dict[str, Step] = {
    'classifier, ViT': _step('classify_vit', 112, 64, DEIT),
    'CLIP, two towers': _step('clip_vit', 112, 64, DEIT, *TEXT),
    'SimCLR, ConvNet': _step('simclr_vit', 64, 32, CONVNEXT),
    'DINO, ViT': _step('dino_vit', 112, 32, DEIT, 'model.head.use_bn=False'),
    'classifier, of transformers': _step('classify_vit', 112, 64, MSN),
    'classifier, of torchvision': _step(
        'classify_vit',
        112,
        16,
        "type='TorchvisionBackbone',model_name='mnasnet1_0'",
        f'train_dataloader.dataset.pipeline={RGB}',
        shares=(0.9, 0.75, 0.6, 0.5),
    ),
    'classifier, of timm': _step(
        'classify_vit',
        64,
        64,
        "type='TimmBackbone',model_name='regnetx_002',in_chans=1",
        shares=(0.96, 0.92, 0.88),
    ),
    'SimCLR, ViT': _step('simclr_vit', 112, 32, DEIT),
    'SigLIP, ConvNet and text': _step(
        'siglip_vit', 64, 64, CONVNEXT, *TEXT, shares=(0.9, 0.6, 0.45)
    ),
    'DINO, ViT and BatchNorm': _step('dino_vit', 112, 32, DEIT, shares=(0.9, 0.6, 0.5, 0.4)),
    'CLIP over two ranks, DDP': _step(
        'clip_vit',
        112,
        32,
        DEIT,
        *TEXT,
        'model_wrapper_cfg.type=DisCoDistributedDataParallel',
        ranks=2,
    ),
    'classifier, sharded over two ranks': _step(
        'classify_vit',
        112,
        32,
        DEIT,
        'model_wrapper_cfg.type=FullyShardedDataParallel',
        ranks=2,
    ),
}


def plans(name: str, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Plans of one config for shares of what it takes as it is."""
    step = STEPS[name]
    planner = Planner(config_of(step))
    whole = planner.plain().peak_bytes
    for share in shares:
        budget = int(share * budget_for(whole))
        found = planner.find(budget)
        assert found.chosen is not None, f'{share} leaves no plan'
        faster = found.next_faster
        yield {
            'name': name,
            'config': step.config,
            'share': share,
            'budget': budget,
            'options': said(planner.options(found.chosen.plan)).split(),
            'times': found.chosen.seconds / found.plain.seconds,
            'faster_budget': faster and budget_for(faster.cost.peak_bytes),
        }


def taken(step: Step, options: Sequence[str]) -> dict[str, int]:
    """The peak of a step under a plan, predicted and measured in a process of its own."""
    if step.ranks > 1:
        options = *step.options, *options
        figures = memory_prediction.measure(step.config, options, step.ranks)
        return {
            'predicted_bytes': figures['predicted_bytes'],
            'measured_bytes': figures['peak_bytes'],
        }
    with ProcessPoolExecutor(1, get_context('forkserver')) as child:  # has imported this file
        return child.submit(_taken, step, options).result()


def _taken(step: Step, options: Sequence[str]) -> dict[str, int]:
    MMLogger.get_current_instance().setLevel('ERROR')
    torch.set_num_threads(1)
    map_blocks_singly()
    cfg = config_of(step, *options)
    build = step_of(cfg, first_batch(cfg))
    predicted = predict(build)  # which imports what is left
    return {
        'predicted_bytes': predicted.peak_bytes,
        'measured_bytes': measure(build).peak_bytes,
    }


def config_of(step: Step, *options: str) -> Config:
    """A step's config, with further options."""
    command = ['predict', f'configs/{step.config}.py', '--gpus', str(step.ranks)]
    command += ['--cfg-options', *step.options, *options]
    return read_config(make_parser().parse_args(command))


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, what it comes to, and where it comes from."""
    cells = [
        ['step', 'budget, MiB', 'plan', 'predicted', 'measured', 'error']
        + ['of the budget', 'predicted, of what is usable', 'next faster']
    ]
    errors, within, used, filled = [], 0, 0, 0
    for row in results['rows']:
        budget, predicted, measured = (
            row[key] for key in ('budget', 'predicted_bytes', 'measured_bytes')
        )
        errors.append(predicted / measured - 1)
        within += measured <= budget
        used += measured >= 0.95 * budget
        of_usable = predicted / usable_bytes(budget)
        filled += of_usable >= 0.95
        plan = ' '.join(f'`{option}`' for option in row['options'])
        mib = [f'{nbytes / 2**20:.1f}' for nbytes in (predicted, measured)]
        needed = row.get('faster_budget')
        faster = f'{needed / budget:.1%}' if needed else '–'
        cells.append(
            [row['name'], f'{budget / 2**20:.1f}', plan, *mib]
            + [f'{errors[-1]:+.1%}', f'{measured / budget:.1%}', f'{of_usable:.1%}', faster]
        )
    sizes = [abs(error) for error in errors]
    summary = (
        f'{within} of {len(errors)} plans within their budget, {used} of them with 95 % of it or '
        f'more, {filled} with as much of what is usable of it; predicted against measured: median '
        f'{statistics.median(sizes):.1%}, from {min(errors):+.1%} to {max(errors):+.1%}.'
    )
    return {'plans': f'{measuring.table(cells)}\n\n{summary}\n\n{measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--only', nargs='+', choices=STEPS, default=list(STEPS), metavar='STEP')
    parser.add_argument('--again', action='store_true', help='measure what is planned already')
    args = parser.parse_args()
    MMLogger.get_current_instance().setLevel('ERROR')
    for name in args.only:
        step, there = STEPS[name], [row for row in _rows(args.out) if row['name'] == name]
        todo = [share for share in step.shares if share not in {row['share'] for row in there}]
        with pretended_ranks(step.ranks) if step.ranks > 1 else nullcontext():
            new = plans(name, todo) if todo and not args.again else ()
            for row in there if args.again else new:
                row |= taken(step, row['options'])
                others = [one for one in _rows(args.out) if not _is_same(one, row)]
                _publish([*others, row], args.out, None)
    _publish(_rows(args.out), args.out, args.page)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ('name', 'share'))


def _rows(folder: Path) -> list[dict[str, Any]]:
    """What is there already, also by another run that goes on beside this one."""
    file = folder / 'plans.json'
    return json.loads(file.read_text())['rows'] if file.is_file() else []


def _publish(rows: list[dict[str, Any]], folder: Path, page: Path | None) -> None:
    order = list(STEPS)
    rows.sort(key=lambda row: (order.index(row['name']), -row['share']))
    results = {'run': measuring.where(torch.device('cpu')), 'rows': rows}
    measuring.publish(results, 'plans', tables, folder, page)


if __name__ == '__main__':
    main()
