"""Models of fewer blocks."""

import torch
from torch import nn

from memengine.techniques.modules.depth import lists_of_blocks, place_of, shorten


def block(width=4):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(*[block() for _ in range(8)])
        self.text = nn.ModuleList([block() for _ in range(5)])
        self.head = nn.Sequential(*[block(width) for width in (4, 4, 4, 5)])
        self.drops = nn.ModuleList([nn.Dropout() for _ in range(6)])

    def forward(self, x):
        for one in self.text:
            x = one(x)
        return self.head(self.image(x))


def test_lists_of_equal_blocks_are_found_and_shortened():
    model = Towers()
    assert lists_of_blocks(model) == {'image': 8, 'text': 5}
    shorten(model, {8: 3})
    assert [len(model.image), len(model.text), len(model.head)] == [3, 5, 4]
    assert model(torch.zeros(2, 4)).shape == (2, 4)


def test_a_place_is_the_same_at_every_depth():
    for depth in (3, 4):
        names = ['image.0.0', f'image.{depth - 1}.2', 'image.1', 'image', 'head.1', '']
        assert [place_of(name, {'image': depth}) for name in names] == [
            'image.first.0',
            'image.last.2',
            'image.another',
            'image',
            'head.1',
            '',
        ]
