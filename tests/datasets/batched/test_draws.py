"""Random numbers of a batch are functions of each sample's seed."""

import numpy as np
import torch

from memengine.datasets.batched import Draws

SEEDS = [0, 1, 2**63, 2**64 - 1, 12345]


def test_numbers_are_those_of_splitmix64():
    """The first three of seed 1234567, which the generator's authors publish with their code."""
    bits = Draws.from_seeds([1234567])._bits(3)[0].tolist()
    assert [each % 2**64 for each in bits] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_sample_draws_the_same_in_any_batch():
    together, alone = Draws.from_seeds(SEEDS), [Draws.from_seeds([seed]) for seed in SEEDS]
    for take in (
        lambda draws: draws.uniform(3, 2, low=-1, high=5),
        lambda draws: draws.normal(5),
        lambda draws: draws.split().uniform(),
    ):
        assert torch.equal(take(together), torch.cat([take(each) for each in alone]))


def test_split_draws_do_not_depend_on_what_is_drawn_beside_them():
    first, second = Draws.from_seeds(SEEDS), Draws.from_seeds(SEEDS)
    child = first.split()
    child.normal(100)
    second.split()
    assert torch.equal(first.uniform(4), second.uniform(4))
    rows = torch.tensor([3, 1])
    chosen = Draws.from_seeds(SEEDS).split().of(rows).uniform(2)
    assert torch.equal(chosen, Draws.from_seeds(SEEDS).split().uniform(2)[rows])


def test_views_of_a_sample_differ():
    views = Draws.from_seeds(SEEDS).split(3).uniform().view(3, len(SEEDS))
    assert len(views.unique()) == 15


def test_uniform_and_normal_numbers_are():
    draws = Draws(torch.arange(2000))
    uniform = draws.uniform(100, low=2, high=4)
    assert uniform.min() > 2 and uniform.max() < 4
    counts = np.histogram(uniform.numpy(), bins=20, range=(2, 4))[0] / uniform.numel()
    np.testing.assert_allclose(counts, 0.05, atol=0.005)
    normal = draws.normal(101)
    assert normal.isfinite().all() and normal.shape == (2000, 101)
    torch.testing.assert_close(normal.mean(), torch.tensor(0.0), atol=0.02, rtol=0)
    torch.testing.assert_close(normal.std(), torch.tensor(1.0), atol=0.02, rtol=0)
    correlation = torch.corrcoef(normal.t()).fill_diagonal_(0)
    assert correlation.abs().max() < 0.15  # of 2000 samples: 0.022 a standard deviation
