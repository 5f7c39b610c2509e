"""Plans of shipped configs and of models from outside: predicted and measured beside the budget.

Each config is planned for shares of what its step takes as it is. A plan's options are measured in
a process of its own, with one thread, by ``memengine measure``: the kernel's high-water mark. Rows
that are in the results already are kept, so that a run that is broken off goes on. Nothing is
timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import torch
from memory_prediction import measure
from mmengine.logging import MMLogger

from memengine._torch_private.distributed import pretended_ranks
from memengine.engine.cli.commands import read_config
from memengine.engine.cli.parser import make_parser
from memengine.engine.cli.plan import said
from memengine.engine.config.planning import Planner, budget_for

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
    """A config, what is set in it, and how many processes carry it out."""

    config: str
    options: tuple[str, ...]
    ranks: int = 1


def _step(config: str, size: int, batch: int, backbone: str, *options: str, ranks: int = 1) -> Step:
    """A shipped config with another backbone, on its digits enlarged to ``size`` pixels."""
    place = 'image' if config in ('clip_vit', 'siglip_vit') else 'backbone'
    views = '.views.0.pipeline.0' if config in ('simclr_vit', 'dino_vit') else ''
    settings = (
        f'model.{place}=dict(_delete_=True,{backbone})',
        f'{CROP}{views}.size={size}',
        f'train_dataloader.batch_size={batch}',
        *options,
    )
    return Step(config, settings, ranks)


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
    ),
    'classifier, of timm': _step(
        'classify_vit', 64, 64, "type='TimmBackbone',model_name='regnetx_002',in_chans=1"
    ),
    'SimCLR, ViT': _step('simclr_vit', 112, 32, DEIT),
    'SigLIP, ConvNet and text': _step('siglip_vit', 64, 64, CONVNEXT, *TEXT),
    'DINO, ViT and BatchNorm': _step('dino_vit', 112, 32, DEIT),
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
SHARES = (0.9, 0.6, 0.4)


def plans(name: str, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Predicted and measured, of the plans of one config for shares of what it takes as it is."""
    config, options, ranks = STEPS[name]
    command = ['predict', f'configs/{config}.py', '--gpus', str(ranks), '--cfg-options', *options]
    cfg = read_config(make_parser().parse_args(command))
    planner = Planner(cfg)
    whole = planner.plain().peak_bytes
    for share in shares:
        budget = int(share * budget_for(whole))
        found = planner.find(budget)
        row: dict[str, Any] = {'name': name, 'config': config, 'share': share, 'budget': budget}
        if found.chosen is None:
            yield row | {'least': budget_for(found.leanest.cost.peak_bytes)}
            continue
        line = said(planner.options(found.chosen.plan)).split()
        yield row | {
            'options': line,
            'predicted_bytes': found.chosen.cost.peak_bytes,
            'measured_bytes': measure(config, (*options, *line), ranks)['peak_bytes'],
            'times': found.chosen.seconds / found.plain.seconds,
        }


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, what it comes to, and where it comes from."""
    cells = [['step', 'budget, MiB', 'plan', 'predicted', 'measured', 'error', 'of the budget']]
    errors, within = [], 0
    for row in results['rows']:
        budget = f'{row["budget"] / 2**20:.1f}'
        if 'least' in row:
            least = f'nothing fits; {row["least"] / 2**20:.1f} MiB would do'
            cells.append([row['name'], budget, least, '–', '–', '–', '–'])
            continue
        predicted, measured = row['predicted_bytes'], row['measured_bytes']
        errors.append(predicted / measured - 1)
        within += measured <= row['budget']
        plan = ' '.join(f'`{option}`' for option in row['options'])
        mib = [f'{nbytes / 2**20:.1f}' for nbytes in (predicted, measured)]
        share = f'{measured / row["budget"]:.1%}'
        cells.append([row['name'], budget, plan, *mib, f'{errors[-1]:+.1%}', share])
    sizes = [abs(error) for error in errors]
    summary = (
        f'{within} of {len(errors)} plans within their budget; predicted against measured: median '
        f'{statistics.median(sizes):.1%}, from {min(errors):+.1%} to {max(errors):+.1%}.'
    )
    return {'plans': f'{measuring.table(cells)}\n\n{summary}\n\n{measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--only', nargs='+', choices=STEPS, default=list(STEPS), metavar='STEP')
    args = parser.parse_args()
    MMLogger.get_current_instance().setLevel('ERROR')
    for name in args.only:
        done = {row['share'] for row in _rows(args.out) if row['name'] == name}
        todo, ranks = [share for share in SHARES if share not in done], STEPS[name].ranks
        with pretended_ranks(ranks) if ranks > 1 else nullcontext():
            for row in plans(name, todo) if todo else ():
                _publish([*_rows(args.out), row], args.out, None)
    _publish(_rows(args.out), args.out, args.page)


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
