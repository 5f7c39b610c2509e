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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import measuring
import torch
from memory_prediction import measure
from mmengine.logging import MMLogger

from memengine.engine.cli.parser import make_parser
from memengine.engine.cli.plan import said
from memengine.engine.config.check import check_config
from memengine.engine.config.file import load_config
from memengine.engine.config.planning import Planner, budget_for

MSN = 'hidden_size=128,num_hidden_layers=3,num_attention_heads=4,intermediate_size=256'


def _on(backbone: str) -> tuple[str, ...]:
    return (f'model.backbone=dict(_delete_=True,{backbone})',)


STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    'classifier': ('classify_vit', ()),
    'SimCLR': ('simclr_vit', ()),
    'CLIP': ('clip_vit', ()),
    'DINO': ('dino_vit', ()),
    'SigLIP': ('siglip_vit', ()),
    'DINO, photographs': ('dino_vit_photographs', ()),
    'timm': (
        'classify_vit',
        _on("type='TimmBackbone',model_name='repghostnet_050',in_chans=1"),
    ),
    'transformers': (
        'classify_vit',
        _on(
            "type='TransformersImage',model_name='vit_msn',pretrained=False,"
            f'config=dict(num_channels=1,image_size=16,patch_size=4,{MSN})'
        ),
    ),
    'SimCLR, ConvNet': (
        'simclr_vit',
        _on("type='TimmBackbone',model_name='convnextv2_atto',in_chans=1"),
    ),
}
SHARES = (0.9, 0.6, 0.4)


def plans(name: str) -> Iterator[dict[str, Any]]:
    """Predicted and measured, of the plans of one config."""
    config, options = STEPS[name]
    file = f'configs/{config}.py'
    args = make_parser().parse_args(['predict', file, *_options(options)])
    cfg = load_config(str(measuring.ROOT / file), args.cfg_options or {})
    cfg.setdefault('default_scope', 'memengine')
    check_config(cfg)
    planner = Planner(cfg)
    whole = planner.plain().peak_bytes
    for share in SHARES:
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
            'measured_bytes': measure(config, (*options, *line))['peak_bytes'],
            'times': found.chosen.seconds / found.plain.seconds,
        }


def _options(options: tuple[str, ...]) -> list[str]:
    return ['--cfg-options', *options] if options else []


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
    file = args.out / 'plans.json'
    rows = json.loads(file.read_text())['rows'] if file.is_file() else []
    for name in args.only:
        if any(row['name'] == name for row in rows):
            continue
        rows += plans(name)
        results = {'run': measuring.where(torch.device('cpu')), 'rows': rows}
        measuring.publish(results, 'plans', tables, args.out, args.page)


if __name__ == '__main__':
    main()
