"""How long it takes to plan the steps of two deep models for eight GPUs, on this machine.

Each plan is that of the command line, in a process of its own: torch's import counts, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import torch


class Search(NamedTuple):
    """A plan that is asked for: a shipped config with another model, and what there is for it."""

    config: str
    budget: str
    batch: int
    options: Sequence[str]
    gpus: int = 8


SEARCHES = {
    'CLIP, ViT-L/14': Search(
        'clip_vit',
        '24GiB',
        32_768,
        (
            "model.image=dict(_delete_=True,type='TimmBackbone',"
            "model_name='vit_large_patch14_clip_224',in_chans=1)",
            "model.text=dict(_delete_=True,type='TextTransformer',vocab_size=49408,"
            'context_length=77,width=768,depth=12)',
            'model.embed_dim=768',
            'train_dataloader.drop_last=False',
            'train_dataloader.dataset.pipeline.0.size=224',
            'train_dataloader.dataset.pipeline.9.tokenizer.context_length=77',
            'model_wrapper_cfg.type=DisCoDistributedDataParallel',
        ),
    ),
    'DINO, ViT-g/14, 8 local crops': Search(
        'dino_vit_photographs',
        '80GiB',
        1024,
        (
            "model.backbone=dict(_delete_=True,type='TimmBackbone',"
            "model_name='vit_giant_patch14_dinov2',img_size=224,dynamic_img_size=True)",
            "model.head=dict(_delete_=True,type='DINOHead',out_dim=65536,use_bn=False)",
            'model.local_crops=8',
            'train_dataloader.dataset.pipeline.0.views.1.num=8',
            'train_dataloader.dataset.pipeline.0.views.0.pipeline.0.size=224',
            'train_dataloader.dataset.pipeline.0.views.1.pipeline.0.size=98',
        ),
    ),
}


def planned(search: Search) -> dict[str, Any]:
    """What the command plans, and its seconds of wall and processor time."""
    command = [sys.executable, '-m', 'memengine', 'plan', f'configs/{search.config}.py', '--json']
    command += ['--budget', search.budget, '--batch', str(search.batch)]
    command += ['--gpus', str(search.gpus), '--cfg-options', *search.options]
    start, before = time.perf_counter(), os.times()
    ran = subprocess.run(command, cwd=measuring.ROOT, stdout=subprocess.PIPE, check=True)
    wall, after = time.perf_counter() - start, os.times()
    plan = json.loads(ran.stdout.splitlines()[-1])
    return {
        'budget': search.budget,
        'batch': search.batch,
        'plan': plan['options'],
        'share': plan['tried'][plan['chosen']]['peak_bytes'] / plan['limit_bytes'],
        'wall_s': wall,
        'cpu_s': sum(after[2:4]) - sum(before[2:4]),  # of children
    }


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [['step', 'budget of each', 'batch', 'plan', 'of what is usable', 'wall', 'CPU']]
    for row in results['rows']:
        plan = ' '.join(f'`{name}={value}`' for name, value in row['plan'].items())
        times = [f'{row[key]:.0f} s' for key in ('wall_s', 'cpu_s')]
        cells.append(
            [row['name'], row['budget'], f'{row["batch"]:,}', plan, f'{row["share"]:.1%}', *times]
        )
    return {'deep_plans': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    args = parser.parse_args()
    rows = [{'name': name, **planned(search)} for name, search in SEARCHES.items()]
    results = {'run': measuring.where(torch.device('cpu')), 'rows': rows}
    measuring.publish(results, 'deep_plans', tables, args.out, args.page)


if __name__ == '__main__':
    main()
