"""The benchmark of contrastive losses at its quick size: forms that agree, counts that hold."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from memengine.testing import run_ranks
from tests.tools.test_benchmarks import results_of
from tests.tools.test_benchmarks import script as script  # a fixture


@pytest.mark.slow
@pytest.mark.usefixtures('script')
def test_counts(monkeypatch, tmp_path):
    import contrastive_losses  # by its name, as ranks import it too

    words = [contrastive_losses.__file__, '--quick', '--out', str(tmp_path)]
    monkeypatch.setattr(sys, 'argv', words)
    contrastive_losses.main()
    results = results_of(tmp_path, 'contrastive_losses')
    rows = {(row['who'], row['ranks'], row['batch_size']): row for row in results['rows']}
    dim, largest = results['settings']['dim'], max(results['settings']['sizes'])
    for (who, ranks, _), row in rows.items():
        if who == 'memengine':
            assert row['products'] == 4 / ranks
        if who == 'memengine, untiled':
            assert row['products'] == 3 / ranks
    disco = rows['DisCo-CLIP (own form)', 2, largest]
    assert disco['products'] == 3
    side = largest // 2 * dim * 4 / 2**20  # one rank's rows of one side
    assert disco['received_mib'] == pytest.approx(2 * side + 2 * 2 * side, rel=1e-3)
    ours = rows['memengine', 2, largest]
    assert ours['received_mib'] < 0.5 * disco['received_mib']
    assert len(results['largest']) == len({(row['who'], row['ranks']) for row in results['rows']})
    assert (tmp_path / 'contrastive_losses.png').stat().st_size > 10_000


PEER = """
import torch


class ClipLoss(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()

    def forward(self, images, texts, scale):
        logits, targets = scale * images @ texts.T, torch.arange(len(images))
        both = [torch.nn.functional.cross_entropy(m, targets) for m in (logits, logits.T)]
        return sum(both) / 2
"""


@pytest.mark.usefixtures('script')
def test_a_peer_without_its_requirements_is_found_and_a_crash_loses_no_row(monkeypatch, tmp_path):
    import contrastive_losses

    package = tmp_path / 'peers' / 'open_clip'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text('import not_installed_at_all')
    (package / 'loss.py').write_text(PEER)
    out = tmp_path / 'out'
    words = [contrastive_losses.__file__, '--quick', '--ranks', '1', '--sizes', '64', '--large']
    words += ['--out', str(out), '--peers', str(package.parent)]
    monkeypatch.setattr(sys, 'argv', words)
    monkeypatch.setattr('importlib.metadata.distributions', lambda **options: [])
    contrastive_losses.main()
    results = results_of(out, 'contrastive_losses')
    assert {row['who'] for row in results['rows']} >= {'memengine', 'open_clip'}
    assert results['run']['versions']['open_clip'] == 'unknown'
    assert results['largest'] == []  # one batch tells no growth
    partial = out / 'contrastive_losses.partial.jsonl'
    assert not partial.exists()

    def crash(rows):
        raise MemoryError

    monkeypatch.setattr(contrastive_losses, 'largest_batches', crash)
    with pytest.raises(MemoryError):
        contrastive_losses.main()
    rows = [json.loads(line) for line in partial.read_text().splitlines()]
    assert [row['who'] for row in rows] == [row['who'] for row in results['rows']]


def _mean_gradients(rank, world_size):
    """Each form's loss and gradient of the images, on this rank."""
    import contrastive_losses

    torch.manual_seed(0)
    whole = contrastive_losses.features(8, 5, 7.0)
    results = {}
    for name, form in contrastive_losses.forms_of(world_size, []).items():
        images, texts, scale = (
            t.detach()[4 * rank : 4 * rank + 4] if t.dim() else t.detach() for t in whole
        )
        form(images.requires_grad_(), texts, scale).backward()
        results[name] = images.grad
    assert dist.get_world_size() == world_size
    images, texts, scale = (t.detach() for t in whole)
    logits = scale * images.requires_grad_() @ texts.T
    (sum(F.cross_entropy(m, torch.arange(8)) for m in (logits, logits.T)) / 2).backward()
    return results, images.grad[4 * rank : 4 * rank + 4]


@pytest.mark.usefixtures('script')
def test_forms_have_the_gradient_of_the_batch():
    for results, expected in run_ranks(2, _mean_gradients):
        assert len(results) >= 4
        for name, gradient in results.items():
            assert torch.allclose(gradient / 2, expected, atol=1e-6), name
