"""DropIT's codec: seconds to encode and decode a layer's input, bytes that it keeps, what is lost.

Beside it the published implementation, when its folder is given; its indices on ``ctx`` count, too.
CPU seconds, all in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import measuring
import torch
from torch import Tensor, nn

from memengine.memory.ledger import blocks_of, tensors_in
from memengine.techniques.codecs.sparse import Cast, Sparsifier

PEER = 'reference DropIT'
INPUTS = {
    "fc2's in deit_tiny": (16, 197, 768),
    "a convolution's in resnet50": (16, 64, 56, 56),
}
QUICK = {'a small one': (4, 16, 256)}
GAMMAS = (0.5, 0.7, 0.9)
WAYS: dict[str, dict[str, Any]] = {
    'mink': dict(strategy='mink'),
    'random': dict(strategy='random'),
    'block_mink': dict(strategy='block_mink'),
    'block_mink, rows': dict(strategy='block_mink', block_size='row'),
    'block_mink, 16 bits': dict(strategy='block_mink', values=Cast()),
}
Encode = Callable[[Tensor], Any]
Decode = Callable[[Any], Tensor]


def ways(gamma: float, peer: ModuleType | None) -> Iterator[tuple[str, Encode, Decode]]:
    """Who is compared, how it encodes, and how it decodes."""
    for name, settings in WAYS.items():
        yield name, Sparsifier(gamma=gamma, **settings), lambda code: code.decode()
    if peer is not None:
        dropiter = peer.dropiter.DropITer('mink', gamma)
        yield PEER, partial(peer_encode, dropiter), partial(peer_decode, dropiter)


def peer_encode(dropiter: Any, tensor: Tensor) -> tuple[Tensor, SimpleNamespace]:
    """What the peer's layers keep: values, and on ``ctx`` the rest."""
    ctx = SimpleNamespace(shape=tensor.shape)
    return dropiter.select(tensor, ctx), ctx


def peer_decode(dropiter: Any, code: tuple[Tensor, SimpleNamespace]) -> Tensor:
    values, ctx = code
    return dropiter.pad(values, SimpleNamespace(**vars(ctx))).view(ctx.shape)


def import_reference(folders: Sequence[str]) -> ModuleType | None:
    """The peer's package; of transformers it needs no more than the name of a layer."""
    if not folders:
        return None
    stand_in = importlib.util.find_spec('transformers') is None
    if stand_in:
        layers = SimpleNamespace(Conv1D=type('Conv1D', (), {}))
        sys.modules['transformers'] = SimpleNamespace(pytorch_utils=layers)  # type: ignore[assignment]
    try:
        found = measuring.import_peer('dropit', folders)
    finally:
        if stand_in:
            del sys.modules['transformers']
    if found is None:
        raise ValueError(f'--peers: no package dropit in {", ".join(folders)}')
    return found


def measure(
    tensor: Tensor, gamma: float, peer: ModuleType | None, repeats: int
) -> dict[str, dict[str, Any]]:
    """Each way's bytes, error and seconds for one tensor."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, tuple[nn.Module, measuring.Step]] = {}
    for name, encode, decode in ways(gamma, peer):
        code = encode(tensor)
        kept = {block.key: block.nbytes for part in tensors_in(code) for block in blocks_of(part)}
        rows[name] = {
            'bytes_share': sum(kept.values()) / (tensor.numel() * tensor.element_size()),
            'error': measuring.relative_error([decode(code)], [tensor]),
        }
        steps[f'{name} encode'] = (nn.Identity(), partial(encode, tensor))
        steps[f'{name} decode'] = (nn.Identity(), partial(decode, code))
    seconds = measuring.time_in_turn(steps, repeats, torch.device('cpu'))
    for name, row in rows.items():
        for what in ('encode', 'decode'):
            taken = seconds[f'{name} {what}']
            row[f'{what}_ns_per_element'] = statistics.median(taken) / tensor.numel() * 1e9
            if peer is not None:
                row[f'{what}_speedup'] = measuring.ratio(seconds[f'{PEER} {what}'], taken)
    return rows


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The page's table, and where it comes from."""
    cells = [
        [
            'input',
            'γ',
            '',
            'bytes, of dense',
            'lost, of its norm',
            'encoding, ns an element',
            'decoding',
            'encoding, times as fast as the reference',
        ]
    ]
    for run in results['inputs']:
        for name, row in run['rows'].items():
            speedup = row.get('encode_speedup')
            cells.append(
                [
                    f'{run["name"]}, {" × ".join(map(str, run["shape"]))}',
                    f'{run["gamma"]:g}',
                    name,
                    f'{row["bytes_share"]:.3f}',
                    f'{row["error"]:.3f}',
                    f'{row["encode_ns_per_element"]:.1f}',
                    f'{row["decode_ns_per_element"]:.1f}',
                    '–' if speedup is None else f'{speedup:.1f}',
                ]
            )
    return {'dropit_selection': f'{measuring.table(cells)}\n\n{measuring.origin(results)}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, required=True, help='folder for the JSON')
    parser.add_argument('--page', type=Path, help='page whose table is to be filled in')
    parser.add_argument('--peers', nargs='*', default=[], help="folder of the reference's package")
    parser.add_argument('--repeats', type=int, default=15, help='rounds of timing')
    parser.add_argument('--threads', type=int, default=1, help='threads of torch')
    parser.add_argument('--quick', action='store_true', help='a small tensor, one round')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    peer = import_reference(args.peers)
    inputs = [
        {
            'name': name,
            'shape': shape,
            'gamma': gamma,
            'rows': measure(torch.randn(shape), gamma, peer, 1 if args.quick else args.repeats),
        }
        for name, shape in (QUICK if args.quick else INPUTS).items()
        for gamma in GAMMAS
    ]
    results = {'run': measuring.where(torch.device('cpu')), 'inputs': inputs}
    measuring.publish(results, 'dropit_selection', tables, args.out, args.page)


if __name__ == '__main__':
    main()
