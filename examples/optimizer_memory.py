"""The optimiser's memory: its step inside backward, and averages in bfloat16.

python examples/optimizer_memory.py
"""

import torch
from torch import nn

from memengine.techniques import AdamWBf16, step_in_backward

MIB = 2**20


def main() -> None:
    """Bytes of gradients and of the optimiser's state after a step, plain and with both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    inputs = torch.randn(8, 256)

    def held(optimizer: torch.optim.Optimizer) -> float:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        state = [x for entry in optimizer.state.values() for x in entry.values()]
        return sum(x.nbytes for x in [*gradients, *state] if isinstance(x, torch.Tensor)) / MIB

    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(inputs).square().mean().backward()
    plain.step()
    before = held(plain)
    plain.zero_grad()

    optimizer = AdamWBf16(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = model(inputs).square().mean()
        with step_in_backward(optimizer):
            loss.backward()  # a gradient is gone as soon as its parameter is updated
        optimizer.step()
        optimizer.zero_grad()
        print(f'loss {loss:.3f}')
    print(f'held: {before:.1f} MiB, with both {held(optimizer):.1f} MiB')


if __name__ == '__main__':
    main()
