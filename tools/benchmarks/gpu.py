"""What only a GPU can tell: time, reserved memory, and whether recomputation gives the same bits.

    python tools/benchmarks/gpu.py --out docs/benchmarks

Tables are printed, and written to ``gpu.md`` beside the figures (``gpu.json``). Without a GPU the
exit status is 1 and nothing is written.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import timm
import torch
from loss_precision import WRITTEN
from measuring import MIB
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memengine import apply_techniques
from memengine._torch_private.compiled_kernels import given_up_on, without_kernels
from memengine.losses import ClipLoss, SigLipLoss
from memengine.techniques.codecs.codec import Codec
from memengine.techniques.codecs.lossless import positive_mask
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Sparsifier

DEVICE = torch.device('cuda')
WAYS: dict[str, dict[str, Any]] = {
    'plain': {},
    'recomputed': dict(recomputed_activations=True),
    'DropIT, gamma 0.9': dict(dropit=0.9),
    '8 bits': dict(quantized_activations=8),
    'recomputed, 8 bits': dict(recomputed_activations=True, quantized_activations=8),
    'checkpointed': dict(activation_checkpointing='blocks'),
    'offloaded': dict(activation_offload=True),
    'recomputed, offloaded': dict(recomputed_activations=True, activation_offload=True),
}
ATTENTION = {
    'flash': SDPBackend.FLASH_ATTENTION,
    'efficient': SDPBackend.EFFICIENT_ATTENTION,
    'math': SDPBackend.MATH,
}


@contextmanager
def in_bf16(backend: SDPBackend | None = None) -> Iterator[None]:
    """bf16 autocast, with a kind of attention."""
    chosen: AbstractContextManager[Any] = nullcontext() if backend is None else sdpa_kernel(backend)
    with torch.autocast('cuda', torch.bfloat16), chosen:
        yield


def make(arch: str, way: Mapping[str, Any], **options: Any) -> nn.Module:
    """The same model each time, with techniques."""
    torch.manual_seed(0)
    model = timm.create_model(arch, **options).to(DEVICE)
    apply_techniques(model, **way)
    return model


def step(model: nn.Module, images: Tensor, backend: SDPBackend | None = None) -> None:
    """Forward and backward."""
    with in_bf16(backend):
        loss = model(images).logsumexp(1).sum()
    loss.backward()


def peaks(run: Callable[[], object]) -> dict[str, float]:
    """The most MiB that a step adds to what is allocated, and all that the allocator reserves."""
    gc.collect()  # models that were before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    measuring.wait(DEVICE)
    return {
        'allocated_mib': (torch.cuda.max_memory_allocated() - before) / MIB,
        'reserved_mib': torch.cuda.max_memory_reserved() / MIB,
    }


def with_times(
    facts: dict[str, dict[str, float]], steps: Mapping[str, Any], repeats: int
) -> dict[str, dict[str, float]]:
    """Facts with the median milliseconds of each step, and its time by the first one's."""
    seconds = measuring.time_in_turn(steps, repeats, DEVICE)
    first = next(iter(seconds.values()))
    for name, found in facts.items():
        found['time'] = measuring.ratio(seconds[name], first)
        found['ms'] = 1000 * statistics.median_high(seconds[name])
    return facts


def time_ways(arch: str, batch: int, repeats: int, **options: Any) -> dict[str, dict[str, float]]:
    """Time of each way by plain's, in turn, and its memory by itself."""
    size = options.get('img_size', 224)
    images = torch.randn(batch, 3, size, size, device=DEVICE)
    facts: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        model = make(arch, way, **options)
        run = partial(step, model, images)
        for _ in range(3):  # the first ones decide, and choose kernels
            run()
            model.zero_grad()
        facts[name] = peaks(run)
    models = {name: make(arch, way, **options) for name, way in WAYS.items()}
    steps = {name: (model, partial(step, model, images)) for name, model in models.items()}
    measuring.time_in_turn(steps, 3, DEVICE)
    return with_times(facts, steps, repeats)


def gradient(arch: str, way: Mapping[str, Any], images: Tensor, **where: Any) -> list[Tensor]:
    """Of the third step, after what is decided in the first."""
    model = make(arch, way, **where.get('options', {}))
    model = model.to(memory_format=where.get('memory_format', torch.contiguous_format))
    for _ in range(3):
        model.zero_grad()
        torch.manual_seed(1)
        step(model, images, where.get('backend'))
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare_bits(vit: str, cnn: str, batch: int, **options: Any) -> dict[str, dict[str, str]]:
    """Whether each exact way gives the plain gradient bit for bit, by what computes it."""
    size = options.get('img_size', 224)
    images = torch.randn(batch, 3, size, size, device=DEVICE)
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        f'{vit}, {name} attention': (vit, dict(backend=backend, options=options))
        for name, backend in ATTENTION.items()
    }
    cases[cnn] = (cnn, {})
    cases[f'{cnn}, channels last'] = (cnn, dict(memory_format=torch.channels_last))
    found: dict[str, dict[str, str]] = {}
    for case, (arch, where) in cases.items():
        inputs = images.to(memory_format=where.get('memory_format', torch.contiguous_format))
        try:
            plain = gradient(arch, {}, inputs, **where)
        except RuntimeError as error:  # a kind of attention that this GPU or build lacks
            found[case] = {'plain, again': f'not available: {str(error).splitlines()[0]}'}
            continue
        ways = {'plain, again': {}, **{name: WAYS[name] for name in EXACT}}
        found[case] = {}
        for name, way in ways.items():
            other = gradient(arch, way, inputs, **where)
            is_same = all(map(torch.equal, other, plain))
            error = measuring.relative_error(other, plain)
            found[case][name] = 'same bits' if is_same else f'{error:.1e}'
    return found


EXACT = ('recomputed', 'checkpointed', 'offloaded')


def time_losses(sizes: Sequence[int], width: int, repeats: int) -> dict[str, dict[str, float]]:
    """Losses of bf16 features, written down and in tiles: memory, and time by that as written."""
    facts: dict[str, dict[str, float]] = {}
    for rows in sizes:
        towers = nn.functional.normalize(torch.randn(2, rows, width, device=DEVICE), dim=2)
        holder = nn.ParameterList(nn.Parameter(tower.bfloat16()) for tower in towers)
        scalars = torch.tensor([100.0, -10.0], device=DEVICE)
        for loss, kind in (('CLIP', ClipLoss), ('SigLIP', SigLipLoss)):
            ways = {'as written': WRITTEN[loss], 'in tiles': kind(tile_size='auto')}
            ways['in tiles of 1,024'] = kind(tile_size=1024)
            ways["in tiles, by torch's operations"] = partial(by_torch, ways['in tiles'])
            ways["in tiles, precision='fp32'"] = kind(tile_size='auto', precision='fp32')
            given = (*holder, *scalars[: 1 if loss == 'CLIP' else 2])
            steps = {
                way: (holder, lambda form=form, given=given: form(*given).backward())
                for way, form in ways.items()
            }
            found = {
                way: fits for way, (_, run) in steps.items() if (fits := peaks_if_it_fits(run))
            }
            seconds = measuring.time_in_turn({way: steps[way] for way in found}, repeats, DEVICE)
            for way, fact in found.items():
                fact['time'] = measuring.ratio(seconds[way], seconds[next(iter(found))])
                fact['ms'] = 1000 * sorted(seconds[way])[len(seconds[way]) // 2]
                facts[f'{loss}, {rows:,} pairs, {way}'] = fact
    return facts


def by_torch(form: Callable[..., Any], *args: Any) -> Any:
    """The result, by torch's operations in the place of kernels of ours."""
    with without_kernels():
        return form(*args)


def peaks_if_it_fits(run: Callable[[], object]) -> dict[str, float]:
    """As :func:`peaks`, or nothing where memory runs out."""
    try:
        return peaks(run)
    except torch.OutOfMemoryError:
        return {}


CODECS: dict[str, Codec] = {
    '8 bits': Quantizer(8),
    '4 bits': Quantizer(4),
    '1 bit': Quantizer(1),
    'where positive': positive_mask,
    'DropIT, gamma 0.9': Sparsifier('mink', 0.9),
    'DropIT of blocks, gamma 0.9': Sparsifier('block_mink', 0.9),
    'DropIT of blocks, gamma 0.5': Sparsifier('block_mink', 0.5),
}


def time_codecs(mib: int, repeats: int) -> dict[str, dict[str, float]]:
    """A bf16 tensor coded and decoded, by kernels of ours and by torch's operations, in turn."""
    tensor = torch.randn(mib * MIB // 2, device=DEVICE).bfloat16()

    def coded_by_torch(codec: Codec) -> None:
        with without_kernels():
            codec(tensor).decode()

    def by_kernels(codec: Codec) -> None:
        codec(tensor).decode()

    holder, facts = nn.Identity(), {}  # which has no gradients to be zeroed
    for name, codec in CODECS.items():
        forms = {'torch': partial(coded_by_torch, codec), 'kernels': partial(by_kernels, codec)}
        steps = {form: (holder, run) for form, run in forms.items()}
        measuring.time_in_turn(steps, 3, DEVICE)  # the first ones compile and compare
        seconds = measuring.time_in_turn(steps, repeats, DEVICE)
        facts[name] = {form: 1000 * sorted(s)[len(s) // 2] for form, s in seconds.items()}
        facts[name]['time'] = measuring.ratio(seconds['kernels'], seconds['torch'])
    return facts


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Of each measurement, with where it comes from."""
    text = {}
    for name in ('ways', 'losses'):
        cells = [['', 'ms', 'of the first', 'MiB allocated', 'MiB reserved']]
        cells += [
            [way, *(f'{f[key]:.{n}f}' for key, n in COLUMNS.items())]
            for way, f in results[name].items()
        ]
        text[name] = measuring.table(cells)
    cells = [['', 'ms by torch', 'ms by kernels', 'of the first']]
    cells += [
        [codec, *(f'{facts[key]:.2f}' for key in ('torch', 'kernels', 'time'))]
        for codec, facts in results['codecs'].items()
    ]
    given_up = ', '.join(results['given_up']) or 'none'
    text['codecs'] = f'{measuring.table(cells)}\n\nKernels that were not used: {given_up}.'
    heads = ['', 'plain, again', *EXACT]
    rows = [[case, *(f.get(h, '') for h in heads[1:])] for case, f in results['bits'].items()]
    text['bits'] = f'{measuring.table([heads, *rows])}\n\n{measuring.origin(results)}'
    return text


COLUMNS = dict(ms=1, time=2, allocated_mib=0, reserved_mib=0)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, required=True, help='folder for the results')
    parser.add_argument('--batch', type=int, default=64)
    parser.add_argument('--repeats', type=int, default=20)
    parser.add_argument('--quick', action='store_true', help='tiny models, to try the script')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit('there is no GPU here, and nothing else can tell what this measures')
    options: dict[str, Any] = {}
    vit, cnn = 'vit_base_patch16_224', 'resnet50'
    sizes, width = [16384, 65536, 262144], 768
    if args.quick:
        vit, cnn = 'vit_tiny_patch16_224', 'resnet10t'
        sizes, width = [64], 16
        options = dict(img_size=32, depth=2, num_classes=8)
        args.batch, args.repeats = 2, 2
    results = {
        'run': measuring.where(DEVICE),
        'ways': time_ways(vit, args.batch, args.repeats, **options),
        'losses': time_losses(sizes, width, min(args.repeats, 5)),
        'codecs': time_codecs(1 if args.quick else 64, args.repeats),
        'bits': compare_bits(vit, cnn, min(args.batch, 8), **options),
    }
    results['given_up'] = given_up_on(torch.empty(0, device=DEVICE).device)
    measuring.publish(results, 'gpu', tables, args.out, None)
    (args.out / 'gpu.md').write_text('\n\n'.join(tables(results).values()) + '\n')


if __name__ == '__main__':
    main()
