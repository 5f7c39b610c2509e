"""CLIP's loss, forward and backward: bytes, products, traffic and time, beside the known forms.

All forms have the same features and take turns. Bytes, FLOPs and traffic are counted, not timed;
time is CPU seconds of one rank. Besides ours there are open_clip's ClipLoss, if it is installed,
and two forms that are written here from their papers' definitions: DisCo-CLIP's, which gathers both
sides with gradient and computes its own rows of both matrices, and a ring in the manner of Inf-CL,
in which the other side goes round in blocks and comes by again in backward. Inf-CL's own code does
not run here, since it needs Triton and a GPU.

What is measured is written at once, row by row, to contrastive_losses.partial.jsonl in the folder
of the results; a run that ends well turns these rows into its JSON and removes the file.

    python tools/benchmarks/contrastive_losses.py --out docs/benchmarks --peers FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measuring
import torch
import torch.distributed as dist
from measuring import LOOKS, MIB
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from memengine.losses import ClipLoss
from memengine.memory.allocated import allocated_peak_bytes
from memengine.memory.received_bytes import ReceivedBytes
from memengine.testing import run_ranks, saved_bytes

FULL = dict(dim=512, sizes=[1024, 2048, 4096, 8192], large=[16384, 32768, 65536], repeats=5)
QUICK = dict(dim=16, sizes=[64, 128], large=[256], repeats=1)
OURS, UNTILED, OPEN_CLIP = 'memengine', 'memengine, untiled', 'open_clip'
LOCAL, DISCO, RING = 'open_clip, local', 'DisCo-CLIP (own form)', 'ring as in Inf-CL (own form)'
STYLES = {
    OURS: LOOKS['memengine'],
    UNTILED: LOOKS['plain'],
    OPEN_CLIP: dict(color='#d1495b', marker='^'),
    LOCAL: dict(color='#e09f3e', marker='v'),
    DISCO: dict(color='#2a9d8f', marker='D'),
    RING: dict(color='#7b2cbf', marker='P'),
}
NOT_RUN = (
    "Forms named 'own' are written from the papers' definitions. Inf-CL's own code was read and "
    'not run: it imports Triton and needs a GPU.'
)
GIB = 2**30
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


# ------------------------------------------------------------------ peers


class DiscoGather(torch.autograd.Function):
    """All ranks' rows; backward adds up the gradient of all of them and takes its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        everything = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, rows)
        return torch.cat(everything)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def disco(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Own images against all texts, and own texts against all images."""
    all_images, all_texts = DiscoGather.apply(images), DiscoGather.apply(texts)
    targets = torch.arange(len(images)) + dist.get_rank() * len(images)
    by_image = F.cross_entropy(scale * images @ all_texts.T, targets)
    return (by_image + F.cross_entropy(scale * texts @ all_images.T, targets)) / 2


def pass_on(tensor: Tensor) -> Tensor:
    """Give to the next rank, get from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % ranks)
    dist.irecv(received, (rank - 1) % ranks).wait()
    sending.wait()
    return received


class RingLogSumExp(torch.autograd.Function):
    """Log-sum-exp of own rows over all ranks' columns, a rank's block of these at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        total, block = torch.full((len(rows),), -math.inf), columns
        for step in range(dist.get_world_size()):
            block = pass_on(block) if step else block
            total = torch.logaddexp(total, (rows @ block.T).logsumexp(dim=1))
        ctx.save_for_backward(rows, columns, total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns, total = ctx.saved_tensors
        grad_rows, block, grad_block = torch.zeros_like(rows), columns, torch.zeros_like(columns)
        for step in range(dist.get_world_size()):
            if step:
                block, grad_block = pass_on(block), pass_on(grad_block)
            slope = (rows @ block.T - total[:, None]).exp() * grad[:, None]
            grad_rows += slope @ block
            grad_block += slope.T @ rows
        return grad_rows, pass_on(grad_block)


def ring(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Both directions, each with a ring of its own."""
    images = scale * images
    true = torch.linalg.vecdot(images, texts)
    totals = RingLogSumExp.apply(images, texts) + RingLogSumExp.apply(texts, images)
    return (totals / 2 - true).mean()


def forms_of(ranks: int, peers: Sequence[str]) -> dict[str, Form]:
    """What is compared, by name."""
    tiled, untiled = ClipLoss(tile_size='auto'), ClipLoss()
    forms: dict[str, Form] = {OURS: tiled, UNTILED: untiled}
    if ranks > 1:
        tiled.process_group = untiled.process_group = dist.group.WORLD
        forms |= {DISCO: disco, RING: ring}
    open_clip = measuring.import_peer('open_clip.loss', peers)
    if open_clip is None:
        return forms
    if ranks == 1:
        return forms | {OPEN_CLIP: open_clip.ClipLoss()}
    options = dict(rank=dist.get_rank(), world_size=ranks, gather_with_grad=True)
    local = open_clip.ClipLoss(local_loss=True, **options)
    return forms | {OPEN_CLIP: open_clip.ClipLoss(**options), LOCAL: local}


# ------------------------------------------------------------------ measuring


def features(size: int, dim: int, scale: float) -> list[Tensor]:
    """Normalised pairs that resemble each other, and the scale."""
    texts = F.normalize(torch.randn(size, dim), dim=1)
    images = F.normalize(texts + F.normalize(torch.randn(size, dim), dim=1), dim=1)
    return [tensor.requires_grad_() for tensor in (images, texts, torch.tensor(scale))]


def facts(form: Form, inputs: Sequence[Tensor], ranks: int) -> dict[str, float]:
    """Bytes, FLOPs and traffic of a step."""

    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        form(*inputs).backward()

    with FlopCounterMode(display=False) as flops, ReceivedBytes() as received:
        step()
    live = allocated_peak_bytes(step)
    return {
        'saved_mib': saved_bytes(step, *inputs) / MIB,
        'live_mib': live / MIB,
        'features_mib': sum(tensor.nbytes for tensor in inputs) / MIB,
        'products': flops.get_total_flops()
        / (2 * (ranks * len(inputs[0])) ** 2 * inputs[0].shape[1]),
        'received_mib': received.nbytes / MIB,
    }


def seconds(form: Form, inputs: Sequence[Tensor]) -> float:
    """CPU seconds of this process for a step."""
    for tensor in inputs:
        tensor.grad = None
    if dist.is_initialized():
        dist.barrier()
    start = time.process_time()
    form(*inputs).backward()
    return time.process_time() - start


def measure(
    rank: int, ranks: int, settings: Mapping[str, Any], peers: Sequence[str], partial: Path
) -> list[dict]:
    """A row for each form and batch size, of this rank; the first's go to a file as they come."""
    torch.set_num_threads(1)
    rows: list[dict] = []
    for size in [*settings['sizes'], *settings['large']]:
        forms = forms_of(ranks, peers)
        repeats = settings['repeats']
        if size in settings['large']:
            forms, repeats = {OURS: forms[OURS]}, 1
        torch.manual_seed(rank)
        inputs = features(size // ranks, settings['dim'], settings['scale'])
        found = {name: facts(form, inputs, ranks) for name, form in forms.items()}
        times: dict[str, list[float]] = {name: [] for name in forms}
        for number in range(repeats):
            for name in list(forms)[:: -1 if number % 2 else 1]:
                times[name].append(seconds(forms[name], inputs))
        for name in forms:
            row = {'who': name, 'ranks': ranks, 'batch_size': size, **found[name]}
            row['cpu_s'] = statistics.median(times[name])
            for other, key in ((UNTILED, 'time_to_untiled'), (DISCO, 'time_to_disco')):
                if other in times:
                    row[key] = measuring.ratio(times[name], times[other])
            rows.append(row)
        if rank == 0:
            with partial.open('a') as file:
                file.writelines(json.dumps(row) + '\n' for row in rows[-len(forms) :])
            print(f'{ranks} rank(s), batch of {size}: {", ".join(forms)}', flush=True)
    return rows


def largest_batches(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The batch of all ranks that fits in some GiB per rank, of each form.

    All that a rank holds for a batch of B is taken as a B² + b B bytes, with a and b from the two
    largest batches that were measured; the few MiB that do not grow with B are nothing here.
    """
    found = []
    for ranks in sorted({row['ranks'] for row in rows}):
        for who in dict.fromkeys(row['who'] for row in rows if row['ranks'] == ranks):
            some = [row for row in rows if (row['who'], row['ranks']) == (who, ranks)][-2:]
            if len(some) < 2:
                continue
            size = some[-1]['batch_size']
            used = [MIB * (row['live_mib'] + row['features_mib']) for row in some]
            per_row = [nbytes / row['batch_size'] for nbytes, row in zip(used, some, strict=True)]
            square = (per_row[1] - per_row[0]) / (size - some[0]['batch_size'])
            if square * size**2 < 0.02 * used[1]:  # tiles, which do not grow, make it negative
                square = 0.0
            linear = per_row[1] - square * size
            row = {'who': who, 'ranks': ranks}
            for gib in (8, 24, 80):
                root = math.sqrt(linear**2 + 4 * square * gib * GIB)
                row[f'{gib}_gib'] = int(2 * gib * GIB / (linear + root))
            found.append(row)
    return found


# ------------------------------------------------------------------ results


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Markdown by the name of its place."""
    heads = ['form', 'ranks', 'batch', 'saved, MiB', 'live, MiB', 'products', 'received, MiB']
    heads += ['CPU s', 'to untiled', 'to DisCo']
    cells = [heads]
    for row in results['rows']:
        line = [row['who'], str(row['ranks']), f'{row["batch_size"]:,}', f'{row["saved_mib"]:.1f}']
        line += [f'{row["live_mib"]:.1f}', f'{row["products"]:.2f}', f'{row["received_mib"]:.1f}']
        ratios = [row.get(key) for key in ('time_to_untiled', 'time_to_disco')]
        line += [f'{row["cpu_s"]:.2f}', *('' if r is None else f'{r:.2f} ×' for r in ratios)]
        cells.append(line)
    text = f'{measuring.table(cells)}\n\n{NOT_RUN}\n\n{measuring.origin(results)}'
    largest = [['form', 'ranks', '8 GiB', '24 GiB', '80 GiB']]
    for row in results['largest']:
        fits = [f'{row[f"{gib}_gib"]:,}' for gib in (8, 24, 80)]
        largest.append([row['who'], str(row['ranks']), *fits])
    return {'contrastive_losses': text, 'contrastive_losses_largest': measuring.table(largest)}


def plot(results: Mapping[str, Any], folder: Path) -> None:
    """Live bytes and time against the batch size, for each number of ranks."""
    counts = sorted({row['ranks'] for row in results['rows']})
    with measuring.figure(folder / 'contrastive_losses.png', 9, 3.6 * len(counts)) as figure:
        grid = figure.subplots(len(counts), 2, squeeze=False)
        for (left, right), ranks in zip(grid, counts, strict=True):
            for who, style in STYLES.items():
                some = [r for r in results['rows'] if (r['who'], r['ranks']) == (who, ranks)]
                sizes = [row['batch_size'] for row in some]
                if some:
                    left.plot(sizes, [row['live_mib'] for row in some], label=who, **style)
                    right.plot(sizes, [row['cpu_s'] for row in some], label=who, **style)
            where = 'one process' if ranks == 1 else f'each of {ranks} ranks'
            left.set(title=where, ylabel='live at the peak, MiB')
            right.set(title=where, ylabel='forward and backward, CPU s')
            for axes in (left, right):
                axes.set(xlabel='batch, pairs')
                measuring.doubling(axes, 'x', 'y')
            left.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for JSON and plots')
    parser.add_argument('--page', type=Path, help='page whose tables are to be filled in')
    parser.add_argument('--peers', nargs='*', default=[], help='folders to import peers from')
    parser.add_argument('--quick', action='store_true', help='sizes that take seconds')
    parser.add_argument('--repeats', type=int, help='rounds in which each form is timed once')
    parser.add_argument('--sizes', type=int, nargs='+', help='batches of all forms')
    parser.add_argument('--large', type=int, nargs='*', help='batches of ours alone')
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2], help='gloo ranks')
    parser.add_argument('--scale', type=float, default=1 / 0.07, help='of the similarities')
    args = parser.parse_args()
    settings = dict(QUICK if args.quick else FULL, scale=args.scale)
    for name in ('repeats', 'sizes', 'large'):
        given = getattr(args, name)
        settings[name] = settings[name] if given is None else given
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    partial = args.out / 'contrastive_losses.partial.jsonl'
    partial.unlink(missing_ok=True)
    rows: list[dict] = []
    for ranks in args.ranks:
        if ranks == 1:
            rows += measure(0, 1, settings, args.peers, partial)
        else:
            all_rows = run_ranks(ranks, measure, settings, args.peers, partial, timeout_s=86400.0)
            rows += all_rows[0]
    results = {'run': measuring.where(torch.device('cpu')), 'settings': settings}
    if measuring.import_peer('open_clip.loss', args.peers):
        found = measuring.peer_version('open_clip_torch', args.peers)
        results['run']['versions']['open_clip'] = found
    results |= {'rows': rows, 'largest': largest_batches(rows)}
    measuring.publish(results, 'contrastive_losses', tables, args.out, args.page)
    plot(results, args.out)
    partial.unlink()


if __name__ == '__main__':
    main()
