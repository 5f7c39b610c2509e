"""Trains many models with each exact technique, and compares what they learn with the plain step.

    python tools/zoo.py --results docs/zoo.json --page docs/zoo.md

Two steps of SGD in float64. A model is trained in a process of its own. What the file holds of the
same commit is not run again; outcomes other than ``same`` are written down.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from same_training import (
    ROOT,
    STEPS,
    PlainTraining,
    Way,
    accumulated_step,
    end_after,
    gradient_cache_step,
    outcome,
    shaken,
    step_with_updates_inside,
)
from zoo_models import zoo

sys.path.insert(0, str(ROOT / 'tools/benchmarks'))
sys.path.insert(0, str(ROOT))

import measuring

from memengine.techniques import (
    checkpoint_activations,
    efficient_conv_bn_eval,
    offload_activations,
    recompute_activations,
)
from tests.leaks import in_a_process

COMMAND = 'python tools/zoo.py --results docs/zoo.json --page docs/zoo.md'
MOST_SECONDS = 600  # of CPU that a model may take


_OFFLOAD = partial(offload_activations, store='host', min_bytes=0)
_SELECTIVE = partial(checkpoint_activations, keep=['matmuls', 'attention'])
WAYS = {
    'activation_checkpointing': Way((checkpoint_activations,)),
    'activation_checkpointing, keep': Way((_SELECTIVE,)),
    'activation_checkpointing, budget': Way((partial(checkpoint_activations, budget=0.5),)),
    'recomputed_activations': Way((recompute_activations,)),
    'activation_offload': Way((_OFFLOAD,)),
    'efficient_conv_bn_eval': Way((efficient_conv_bn_eval,), is_frozen=True),
    'optimizer_in_backward': Way(step=step_with_updates_inside),
    'accumulation': Way(step=accumulated_step, is_frozen=True),
    'grad_cache': Way(step=gradient_cache_step, is_coupled=True, is_frozen=True),
    'several': Way(
        (
            partial(efficient_conv_bn_eval, strict=False),
            recompute_activations,
            partial(checkpoint_activations, every=2),
            _OFFLOAD,
        ),
        gradient_cache_step,
        is_coupled=True,
        is_frozen=True,
    ),
}


def outcomes_of(name: str) -> dict[str, str]:
    """What becomes of a model in each way of training."""
    end_after(MOST_SECONDS)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter('ignore')
    torch.manual_seed(0)
    entry = zoo()[name]
    plain = PlainTraining(shaken(entry.make()), [entry.batch() for _ in range(STEPS)])
    return {title: outcome(plain, way) for title, way in WAYS.items()}


# ------------------------------------------------------------------ the page


@cache
def commit() -> str:
    """The last one that touches the package."""
    words = ['git', 'log', '-1', '--format=%h', '--', 'memengine']
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """What the page says, by mark."""
    found = results['models']
    kinds = ('same', 'same in the same slices', 'refused', 'unfit', 'wrong')
    counts = [['technique', *kinds]]
    for way in WAYS:
        words = Counter(of.get(way, 'same').partition(':')[0] for of in found.values())
        counts.append([way, *(str(words[kind]) for kind in kinds)])
    sentences: dict[str, list[str]] = {}
    for name, of in found.items():
        for way, what in of.items():
            if what.startswith('refused'):
                sentence = re.sub(r' in \w+(?=;)', ' in the model', what.split(': ', 2)[2])
                sentence = re.sub(r'\w+ has no', 'the model has no', sentence)
                sentence = textwrap.shorten(sentence, 240, placeholder=' ...')
                sentences.setdefault(f'{way} | {sentence}', []).append(name)
    refused = [['technique', 'what the error says', 'models']]
    refused += [
        [row, f'{len(names)}: {", ".join(names[:3])}{", ..." if len(names) > 3 else ""}']
        for row, names in sorted(sentences.items())
    ]
    libraries = {}
    for name in sorted(found):
        library, _, model = name.partition('/')
        libraries.setdefault(library, []).append(model)
    listed = [['library', 'models', 'which']]
    listed += [[one, str(len(all_)), '; '.join(all_)] for one, all_ in libraries.items()]
    return {
        'zoo': f'{measuring.table(counts)}\n\n{len(found)} models. {measuring.origin(results)}',
        'refusals': measuring.table(refused),
        'models': measuring.table(listed),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and write what was found after each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--results', type=Path, required=True, help='JSON to go on with')
    parser.add_argument('--models', nargs='*', help='these only, e.g. timm/resnet10t')
    parser.add_argument('--page', type=Path, help='whose tables are filled, e.g. docs/zoo.md')
    args = parser.parse_args(argv)
    known = json.loads(args.results.read_text()) if args.results.exists() else {}
    if known.get('commit') != commit():
        libraries = {name.partition('/')[0] for name in zoo()} - {'timm'}
        run = measuring.where(torch.device('cpu'), sorted(libraries))
        known = {'commit': commit(), 'run': run | {'command': COMMAND}, 'models': {}}
    models = known['models']
    for name in zoo() if args.models is None else args.models:
        if name in models:
            continue
        start = time.monotonic()
        try:
            found = in_a_process(outcomes_of, name)
        except AssertionError:
            found = dict.fromkeys(WAYS, f'wrong: died, or took over {MOST_SECONDS} s of CPU')
        models[name] = {way: what for way, what in found.items() if what != 'same'}
        bad = [f'{way}: {what}' for way, what in found.items() if what[:4] != 'same']
        print(f'{name} {time.monotonic() - start:.0f} s', *bad, sep='\n    ', flush=True)
        args.results.write_text(json.dumps(known, indent=1) + '\n')
    for mark, text in tables(known).items():
        print(f'{text}\n')
        if args.page:
            measuring.fill_page(args.page, mark, text)


if __name__ == '__main__':
    main()
