"""AdamW's averages in bfloat16, and by torchao in 8 and 4 bits, or on the host of a GPU.

python examples/optimizer_states.py
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from memengine.memory.ledger import blocks_of
from memengine.techniques import AdamWBf16
from memengine.techniques.optimizer_memory.adamw_low_bit import AdamW4bit, AdamW8bit
from memengine.techniques.optimizer_memory.states_on_host import cpu_offload_optimizer


def main() -> None:
    """Bytes of the device that each optimiser's state takes after three steps."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    optimizers: dict[str, Callable[..., Optimizer]] = {'in bfloat16': AdamWBf16}
    if importlib.util.find_spec('torchao'):
        optimizers |= {'in 8 bits': AdamW8bit, 'in 4 bits': AdamW4bit}
        if device == 'cuda':
            optimizers['on the host'] = cpu_offload_optimizer
    plain = train(torch.optim.AdamW, device)
    for name, optimizer in optimizers.items():
        print(f'states: {plain:.2f} MiB, {name} {train(optimizer, device):.2f} MiB')


def train(optimizer_type: Callable[..., Optimizer], device: str) -> float:
    """MiB of the device that the optimiser holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
    inputs = torch.randn(8, 256, device=device)
    optimizer = optimizer_type(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
    print(f'loss {loss:.3f}')
    states = [x for entry in optimizer.state.values() for x in entry.values()]
    tensors = [x for x in states if isinstance(x, torch.Tensor) and x.device.type == device]
    return sum(block.nbytes for tensor in tensors for block in blocks_of(tensor)) / 2**20


if __name__ == '__main__':
    main()
