"""The gradient cache: bytes saved for backward, extra forwards and time, beside its peers.

A ViT embeds two views of each image, NT-Xent contrasts them. The step is carried out at once, in
chunks that are given the right gradient beforehand (what any technique in chunks has to do), by
memengine's gradient cache, and by those peers that are there: luyug's GradCache, and
sentence-transformers' CachedMultipleNegativesRankingLoss (with its own loss on the same pairs). All
share the model and run in turn, in one process.

    python tools/benchmarks/grad_cache.py --out docs/benchmarks \
        --page docs/techniques/grad_cache.md --peers path/to/GradCache/src
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from measuring import LOOKS, MIB, Step
from torch import Tensor, nn

from memengine.losses import NTXentLoss
from memengine.techniques import Tower, cached_step, split_batch

FULL = dict(
    pairs=128,
    image_size=112,
    depth=12,
    chunk_sizes=[4, 8, 16, 32, 64, 128, 256],
    peer_chunk_sizes=[4, 16, 64],
    one_chunk_size=16,  # for the curves over keep_graph and over the batch
    kept=[2, 4, 6, 8, 10, 12, 14, 16],
    batches=[8, 16, 32, 64, 128],
    repeats=6,
)
QUICK = dict(
    pairs=8,
    image_size=32,
    depth=2,
    chunk_sizes=[2, 4, 16],
    peer_chunk_sizes=[4],
    one_chunk_size=4,
    kept=[2, 4],
    batches=[2, 8],
    repeats=1,
)
PLAIN, CHUNKS, OURS = 'plain', 'in chunks', 'memengine'
ONE_FORWARD = 'chunks with one forward'
GRAD_CACHE, SENTENCES = 'GradCache', 'sentence-transformers'


class Pairs(nn.Module):
    """What sentence-transformers calls a model: a dict in, a dict out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getitem__(self, index: int) -> nn.Module:
        return self.model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {'sentence_embedding': self.model(features['images'])}


class Task:
    """An encoder, two views of a batch, and the ways to carry the step out."""

    def __init__(self, settings: Mapping[str, Any], device: torch.device) -> None:
        torch.manual_seed(0)
        size = settings['image_size']
        self.model = timm.create_model(
            'vit_tiny_patch16_224', img_size=size, num_classes=0, depth=settings['depth']
        ).to(device)
        self.images = torch.randn(2 * settings['pairs'], 3, size, size, device=device)
        self.ntxent = NTXentLoss(0.5)
        embeddings = self.model(self.images).detach().requires_grad_()
        self.gradient = torch.autograd.grad(self.loss(embeddings), embeddings)[0]

    def loss(self, embeddings: Tensor) -> Tensor:
        return self.ntxent(*embeddings.chunk(2))

    def plain(self) -> None:
        self.loss(self.model(self.images)).backward()

    def chunks(self, chunk_size: int) -> None:
        """Forward and backward of each chunk, with the gradient of its embeddings as known."""
        parts = zip(self.images.split(chunk_size), self.gradient.split(chunk_size), strict=True)
        for images, gradient in parts:
            self.model(images).backward(gradient)

    def ours(self, chunk_size: int, keep_graph: int = 0, images: Tensor | None = None) -> None:
        images = self.images if images is None else images
        tower = Tower(self.model, split_batch(images, chunk_size))
        cached_step(tower, self.loss, keep_graph=keep_graph)

    def peers(self, folders: list[str]) -> dict[str, Any]:
        """Functions that take a step by the peers that can be imported."""
        found: dict[str, Any] = {}
        if module := measuring.import_peer('grad_cache', folders):
            found[GRAD_CACHE] = partial(self.grad_cache, module.GradCache)
        losses = 'sentence_transformers.sentence_transformer.losses'
        if module := measuring.import_peer(losses, folders):
            found[SENTENCES] = partial(self.sentences, module.CachedMultipleNegativesRankingLoss)
        return found

    def grad_cache(self, peer: Any, chunk_size: int) -> None:
        peer(models=[self.model], chunk_sizes=chunk_size, loss_fn=self.loss)(self.images)

    def sentences(self, peer: Any, chunk_size: int) -> None:
        views = [{'images': view} for view in self.images.chunk(2)]
        peer(Pairs(self.model), mini_batch_size=chunk_size)(views, None).backward()


def plan(task: Task, settings: Mapping[str, Any], peers: Mapping[str, Any]) -> dict[Any, Step]:
    """All steps, by (who, chunk size, chunks kept); those to be compared are neighbours."""
    steps: dict[Any, Step] = {(PLAIN, None, 0): task.plain}
    for size in settings['chunk_sizes']:
        if size in settings['peer_chunk_sizes']:
            for name, step in peers.items():
                steps[name, size, 0] = partial(step, size)
        kept = settings['kept'] if size == settings['one_chunk_size'] else []
        for number in (0, *kept[: len(kept) // 2]):
            steps[OURS, size, number] = partial(task.ours, size, number)
        steps[CHUNKS, size, 0] = partial(task.chunks, size)
        for number in kept[len(kept) // 2 :]:
            steps[OURS, size, number] = partial(task.ours, size, number)
    return steps


def measure(
    settings: Mapping[str, Any], device: torch.device, folders: list[str]
) -> dict[str, Any]:
    """Bytes, forwards, gradient error and time of every step, and bytes against the batch."""
    task = Task(settings, device)
    peers = task.peers(folders)
    print(f'peers that were found: {", ".join(peers) or "none"}', file=sys.stderr)
    steps = plan(task, settings, peers)
    facts = {
        key: measuring.step_facts(step, task.model, [task.images], device)
        for key, step in steps.items()
    }
    seconds = measuring.time_in_turn(
        {key: (task.model, step) for key, step in steps.items()}, settings['repeats'], device
    )
    rows = []
    for (who, size, kept), fact in facts.items():
        times = seconds[who, size, kept]
        row = dict(who=who, chunk_size=size, kept=kept, **fact)
        gradient = row.pop('gradient')
        if who != SENTENCES:  # whose loss is another
            reference = facts[PLAIN, None, 0]['gradient']
            row['gradient_error'] = measuring.relative_error(gradient, reference)
        row['seconds'] = times
        row['time_to_plain'] = measuring.ratio(times, seconds[PLAIN, None, 0])
        if size is not None:
            row['chunks'] = -(-2 * settings['pairs'] // size)
            row['extra_forwards'] = row['forwards'] - row['chunks']
            row['time_to_chunks'] = measuring.ratio(times, seconds[CHUNKS, size, 0])
        rows.append(row)
    packages = ['sentence_transformers'] if SENTENCES in peers else []  # GradCache has no version
    return {
        'run': measuring.where(device, packages),
        'peers': {name: name in peers for name in (GRAD_CACHE, SENTENCES)},
        'settings': dict(settings),
        'rows': rows,
        'batches': batches(task, settings, device),
    }


def batches(task: Task, settings: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Bytes at one chunk size for batches of several sizes."""
    rows = []
    for pairs in settings['batches']:
        images = task.images[: 2 * pairs]
        step = partial(task.ours, settings['one_chunk_size'], images=images)
        fact = measuring.step_facts(step, task.model, [task.images], device)
        embeddings = 2 * images.shape[0] * task.model.num_features * 4 / MIB
        rows.append(dict(pairs=pairs, saved_mib=fact['saved_mib'], embeddings_mib=embeddings))
    return rows


# ------------------------------------------------------------------ showing


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a page, by name."""
    heads = ['', 'chunk size', 'chunks kept', 'saved, MiB', 'extra forwards']
    cells = [[*heads, 'time, plain = 1', f'time, {ONE_FORWARD} = 1']]
    for row in results['rows']:
        if row['who'] == CHUNKS:
            continue
        cells.append(
            [
                row['who'],
                str(row['chunk_size'] or 'all'),
                str(row['kept']),
                f'{row["saved_mib"]:.1f}',
                f'{row.get("extra_forwards", 0)} of {row.get("chunks", 1)}',
                f'{row["time_to_plain"]:.2f}',
                f'{row["time_to_chunks"]:.2f}' if 'time_to_chunks' in row else '',
            ]
        )
    cells_of_batches = [['pairs', 'saved, MiB', 'embeddings and their gradients, MiB']]
    for row in results['batches']:
        figures = [f'{row["saved_mib"]:.2f}', f'{row["embeddings_mib"]:.2f}']
        cells_of_batches.append([str(row['pairs']), *figures])
    return {
        'grad_cache': f'{measuring.table(cells)}\n\n{measuring.origin(results)}',
        'grad_cache_batches': measuring.table(cells_of_batches),
    }


def plot(results: Mapping[str, Any], folder: Path) -> None:
    """Bytes and time against the chunk size, and against the number of chunks kept."""
    rows = results['rows']
    plain = next(row for row in rows if row['who'] == PLAIN)
    with measuring.figure(folder / 'grad_cache.png', 9, 3.8) as figure:
        left, right = figure.subplots(1, 2)
        for who in (OURS, GRAD_CACHE, SENTENCES, CHUNKS):
            some = [row for row in rows if row['who'] == who and row['kept'] == 0]
            sizes = [row['chunk_size'] for row in some]
            for axes, value in ((left, 'saved_mib'), (right, 'time_to_plain')):
                if some:
                    label = ONE_FORWARD if who == CHUNKS else who
                    axes.plot(sizes, [row[value] for row in some], label=label, **LOOKS[who])
        left.axhline(plain['saved_mib'], label=PLAIN, color=LOOKS[PLAIN]['color'])
        right.axhline(1, label=PLAIN, color=LOOKS[PLAIN]['color'])
        left.set(ylabel='saved for backward at the peak, MiB')
        right.set(ylim=(0, None), ylabel='time of a step, plain = 1')
        measuring.doubling(left, 'x', 'y')
        measuring.doubling(right, 'x')
        for axes in (left, right):
            axes.set(xlabel='chunk size, images')
        right.legend(fontsize=9)
    size = results['settings']['one_chunk_size']
    ours = [row for row in rows if row['who'] == OURS and row['chunk_size'] == size]
    kept = [row['kept'] for row in ours]
    with measuring.figure(folder / 'grad_cache_keep_graph.png', 9, 3.8) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(kept, [row['saved_mib'] for row in ours], **LOOKS[OURS])
        right.plot(kept, [row['time_to_chunks'] for row in ours], **LOOKS[OURS])
        right.axhline(1, **{**LOOKS[CHUNKS], 'marker': ''}, label=ONE_FORWARD)
        left.set(ylim=(0, None), ylabel='saved for backward at the peak, MiB')
        right.set(ylim=(0, None), ylabel=f'time, {ONE_FORWARD} = 1')
        for axes in (left, right):
            axes.set(
                xticks=kept, xlabel=f'keep_graph, of {ours[0]["chunks"]} chunks of {size} images'
            )
        right.legend(fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON and plots')
    parser.add_argument('--page', type=Path, help='page whose tables are to be filled in')
    parser.add_argument('--peers', nargs='*', default=[], help='folders to import peers from')
    parser.add_argument('--quick', action='store_true', help='a size that takes seconds')
    parser.add_argument('--repeats', type=int, help='rounds in which each step is timed once')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'))
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = dict(QUICK if args.quick else FULL)
    settings['repeats'] = args.repeats or settings['repeats']
    results = measure(settings, args.device, args.peers)
    measuring.publish(results, 'grad_cache', tables, args.out, args.page)
    plot(results, args.out)


if __name__ == '__main__':
    main()
