"""The optimiser's step inside backward: one gradient at a time.

python examples/step_in_backward.py
"""

import torch
from torch import nn

from memengine.techniques import step_in_backward

MIB = 2**20


def main() -> None:
    """Bytes of the gradients there are at once, plain and with the step in backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    inputs = torch.randn(8, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    most = 0

    def note(parameter: torch.Tensor) -> None:
        nonlocal most
        there = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        most = max(most, there)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    plain, most = most, 0
    for _ in range(3):
        loss = model(inputs).square().mean()
        with step_in_backward(optimizer):
            loss.backward()  # a gradient is gone as soon as its parameter is updated
        optimizer.step()
        optimizer.zero_grad()
        print(f'loss {loss:.3f}')
    print(f'gradients: {plain / MIB:.1f} MiB, with the step in backward {most / MIB:.1f} MiB')


if __name__ == '__main__':
    main()
