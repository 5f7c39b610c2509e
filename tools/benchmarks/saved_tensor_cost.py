"""What compressed activations add to a step: for each saved tensor, and of a whole step.

Of a vision transformer so narrow that its computing vanishes, what a step takes beyond the plain
one is divided by the tensors that it saves: in 8 bits also without the codec, which leaves what
Python takes around it. Of a real one, steps are compared. CPU seconds of this process, steps in
turn, medians over the rounds.

    python tools/benchmarks/saved_tensor_cost.py --rounds 40 --rounds-of-deit 5
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import measuring
import timm
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memengine.techniques import quantize_activations, recompute_activations


class Whole:
    """The code of a codec that computes nothing."""

    nbytes = 0

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def decode(self) -> Tensor:
        """The tensor."""
        return self._tensor


def quantize_by_nothing(model: nn.Module) -> None:
    """Have all done that 8 bits take, but for the codec."""
    rule = quantize_activations(model)
    choose = rule.codec
    rule.codec = lambda *of: None if choose(*of) is None else Whole


WAYS: dict[str, Callable[[nn.Module], object]] = {
    'plain': lambda model: None,
    'recomputed': recompute_activations,
    '8 bits': quantize_activations,
    '8 bits, but for the codec': quantize_by_nothing,
}


def narrow() -> nn.Module:
    """Twelve blocks of a transformer that is 16 wide."""
    how = dict(embed_dim=16, num_heads=2, img_size=32, num_classes=10)
    return timm.create_model('vit_tiny_patch16_224', **how)


def compare(make: Callable[[], nn.Module], images: Tensor, rounds: int) -> None:
    """Print a line for each way."""
    saved: list[int] = []
    with saved_tensors_hooks(lambda tensor: saved.append(1) or tensor, lambda tensor: tensor):
        make()(images)
    steps: dict[str, tuple[nn.Module, measuring.Step]] = {}
    for way, apply in WAYS.items():
        torch.manual_seed(0)
        model = make().train()
        apply(model)
        steps[way] = model, lambda model=model: model(images).sum().backward()
    measuring.time_in_turn(steps, 3, torch.device('cpu'))  # in which techniques compare
    seconds = measuring.time_in_turn(steps, rounds, torch.device('cpu'))
    for way, ours in seconds.items():
        more = statistics.median(a - b for a, b in zip(ours, seconds['plain'], strict=True))
        ratio = measuring.ratio(ours, seconds['plain'])
        each = more / len(saved) * 1e6
        print(f'{way}: {ratio:.2f} x plain, {each:.0f} us for each of {len(saved)} tensors')


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=40, help='of the narrow model')
    parser.add_argument('--rounds-of-deit', type=int, default=5, help='of deit_tiny; 0: none')
    parser.add_argument('--batch', type=int, default=16, help='images of deit_tiny')
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compare(narrow, torch.randn(8, 3, 32, 32), args.rounds)
    if args.rounds_of_deit:
        images = torch.randn(args.batch, 3, 224, 224)
        compare(lambda: timm.create_model('deit_tiny_patch16_224'), images, args.rounds_of_deit)
    where = measuring.where(torch.device('cpu'))
    print(where['machine'], where['load_average'], where['versions'], where['date'])


if __name__ == '__main__':
    main()
