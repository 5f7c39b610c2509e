"""What a forward keeps in containers of its module is found by the repeated one as it was."""

import copy
from collections import Counter, defaultdict, deque

import pytest
import torch
from torch import nn

from memengine.techniques import checkpoint_activations
from tests.techniques.activation_checkpointing.test_other_calls import gradients


class Queue(nn.Module):
    """Reads how much it has kept so far, and keeps more."""

    def __init__(self, container, read, write):
        super().__init__()
        self.container, self.read, self.write = container, read, write
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x).tanh()
        scale = 1 + self.read(self.container)
        self.write(self.container, x.detach().mean())
        return self.last((x * scale).sin()).tanh()


def in_a_ring():
    ring = []
    ring.append(ring)
    return ring


CONTAINERS = {
    'deque': (lambda: deque([0.5], maxlen=2), sum, deque.append),
    'set': (set, len, set.add),
    'counter': (Counter, lambda c: c['calls'], lambda c, x: c.update(['calls'])),
    'list in a dict': (lambda: {'a': []}, lambda c: len(c['a']), lambda c, x: c['a'].append(x)),
    'list in lists': (lambda: [[[]]], lambda c: len(c[0][0]), lambda c, x: c[0][0].append(x)),
    'new list in a dict': (
        lambda: defaultdict(list),
        lambda c: len(c['a']),
        lambda c, x: c['a'].append(x),
    ),
    'deque of lists': (lambda: deque([[]]), lambda c: len(c[0]), lambda c, x: c[0].append(x)),
    'list in itself': (in_a_ring, len, list.append),
}


@pytest.mark.edge(
    'activation_checkpointing',
    'exact',
    'Queues and counts that a forward keeps in dicts, lists, deques and sets of its module, or in '
    'such inside of these: they are read as they were, and count once',
)
@pytest.mark.parametrize('options', [{}, dict(keep='matmuls'), dict(budget=0.4)], ids=str)
@pytest.mark.parametrize('container', CONTAINERS)
def test_containers_are_read_as_they_were(container, options):
    make, read, write = CONTAINERS[container]
    torch.manual_seed(0)
    model = Queue(make(), read, write).double()
    plain = copy.deepcopy(model)
    checkpoint_activations(model, '', **options)
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        found, expected = gradients(model, x), gradients(plain, x)
        assert all(map(torch.equal, found, expected))
        assert read(model.container) == read(plain.container)
