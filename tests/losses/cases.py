"""Every contrastive loss with its formula, dense and in float64, as the papers define it.

A case's tensors are the whole batch, sample by sample along dimension 0; scalars have none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from memengine.losses import ClipLoss, ConLoss, NTXentLoss, SigLipLoss, SupConLoss

D = 5
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    make: Callable  # (tile_size) to the loss
    call: Callable  # (loss, tensors) to its value
    formula: Callable  # (tensors) to the true value
    tensors: Callable  # (samples) to tensors


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rows(*shape: int) -> Tensor:
    return F.normalize(random(*shape), dim=-1)


# ------------------------------------------------------------------ formulas


def clip(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """CLIP (2021), figure 3: the mean of two cross-entropies whose targets are the diagonal."""
    logits, targets = scale * images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SigLIP (2023), equation 1: -1/B sum_ij log 1 / (1 + exp(z_ij (-t x_i.y_j - b)))."""
    logits = scale * images @ texts.T + bias
    z = 2 * torch.eye(len(images), dtype=torch.float64) - 1
    return torch.logaddexp(torch.zeros(()).double(), -z * logits).sum() / len(images)


def ntxent(view1: Tensor, view2: Tensor, temperature: float) -> Tensor:
    """SimCLR (2020), equation 1, over all 2B views."""
    z = torch.cat([view1, view2])
    z = z / z.norm(dim=1, keepdim=True)
    similarity = z @ z.T / temperature
    others = ~torch.eye(len(z), dtype=torch.bool)
    partner = (torch.arange(len(z)) + len(view1)) % len(z)
    log_sums = similarity.masked_fill(~others, -1e300).logsumexp(dim=1)
    return (log_sums - similarity[torch.arange(len(z)), partner]).mean()


def supcon(
    contrasts: Tensor,
    samples: Tensor,
    weights: Tensor,
    anchors: Tensor,
    temperature: float,
    base_temperature: float = 0.07,
    leave_out: bool = False,
) -> Tensor:
    """SupCon (2020), L_out of some anchors: ``weights`` [B, B] says who is whose positive.

    ``samples`` [N] is the sample of each contrast [N, D]. An anchor without positives adds zero,
    and is left out of the mean if ``leave_out``.
    """
    similarity = contrasts @ contrasts.T / temperature
    others = ~torch.eye(len(contrasts), dtype=torch.bool)
    log_sums = similarity.masked_fill(~others, -1e300).logsumexp(dim=1, keepdim=True)
    positive = weights[samples][:, samples] * others  # [N, N]
    counts = positive.sum(dim=1)
    rows = ((log_sums - similarity) * positive).sum(dim=1)[anchors] / counts[anchors].clamp(1e-99)
    total = temperature / base_temperature * rows.sum()
    return total / ((counts[anchors] > 0).sum().clamp(1) if leave_out else anchors.sum())


def weights_of(tensors: Tensors, size: int) -> Tensor:
    if 'mask' in tensors:
        return tensors['mask'].double()
    if 'labels' in tensors:
        return (tensors['labels'][:, None] == tensors['labels'][None]).double()
    return torch.eye(size, dtype=torch.float64)


def views(tensors: Tensors, temperature: float, mode: str, last: bool, leave_out: bool) -> Tensor:
    """SupCon's and SelfCon's loss of features [B, views, outputs, D]; anchors by option.

    ``last``: a sample's last output, the backbone's, is no anchor in any of its views.
    """
    z = tensors['features']
    batch_size, count, outputs = z.shape[:3]
    anchors = torch.ones(z.shape[:3], dtype=torch.bool)
    if last:
        anchors[:, :, -1] = False
    if mode == 'one':
        anchors[:] = False
        anchors[:, 0, 0] = True
    samples = torch.arange(batch_size).repeat_interleave(count * outputs)
    weights = weights_of(tensors, batch_size)
    return supcon(
        z.flatten(0, 2), samples, weights, anchors.flatten(), temperature, leave_out=leave_out
    )


# ------------------------------------------------------------------ cases


def two_towers(size: int, scale: float, bias: float | None = None) -> Tensors:
    tensors = {'images': rows(size, D), 'texts': rows(size, D)}
    tensors['scale'] = torch.tensor(scale, dtype=torch.float64)
    if bias is not None:
        tensors['bias'] = torch.tensor(bias, dtype=torch.float64)
    return tensors


def one_tower(size: int, shape: tuple[int, int], kind: str | None = None) -> Tensors:
    tensors = {'features': rows(size, *shape, D)}
    if kind == 'labels':
        tensors['labels'] = torch.tensor([3, 1, 3, 3, 1, 7, 3, 0, 1, 2, 9, 9])[:size]
    elif kind == 'mask':
        tensors['mask'] = torch.rand(size, size) < 0.4  # not symmetric
    return tensors


def by_name(loss: torch.nn.Module, tensors: Tensors) -> Tensor:
    return loss(*tensors.values())


def by_feature(loss: torch.nn.Module, tensors: Tensors, **options: bool) -> Tensor:
    """Two views in one batch where SelfCon's option wants them so, else all in dimension 1."""
    z, rest = tensors['features'], {k: v for k, v in tensors.items() if k != 'features'}
    z = z.transpose(0, 1).flatten(0, 1) if 'selfcon_m_FG' in options else z.flatten(1, 2)
    return loss(z, **rest, **options)


def tower_case(temperature: float, scale: float) -> Case:
    return Case(
        lambda tile: NTXentLoss(temperature, tile_size=tile),
        by_name,
        lambda t: ntxent(**t, temperature=temperature),
        lambda size: {'view1': random(size, D), 'view2': scale * random(size, D)},
    )


def view_case(
    loss: type,
    shape: tuple[int, int],
    kind: str | None = None,
    temperature: float = 0.2,
    mode: str = 'all',
    last: bool = False,
    leave_out: bool = False,
    **options: bool,
) -> Case:
    return Case(
        lambda tile: loss(temperature, mode, tile_size=tile),
        partial(by_feature, **options),
        lambda t: views(t, temperature, mode, last, leave_out),
        partial(one_tower, shape=shape, kind=kind),
    )


def pair_case(scale: float, bias: float | None = None) -> Case:
    loss, formula = (ClipLoss, clip) if bias is None else (SigLipLoss, siglip)
    return Case(
        lambda tile: loss(tile_size=tile),
        by_name,
        lambda t: formula(**t),
        partial(two_towers, scale=scale, bias=bias),
    )


def learned_temperature(case: Case, formula: Callable) -> Case:
    """The same loss, whose temperature is one of the tensors."""

    def split(tensors: Tensors) -> tuple[Tensors, Tensor]:
        rest = {name: tensor for name, tensor in tensors.items() if name != 'temperature'}
        return rest, tensors['temperature']

    def call(loss: torch.nn.Module, tensors: Tensors) -> Tensor:
        rest, loss.temperature = split(tensors)
        return case.call(loss, rest)

    return Case(
        case.make,
        call,
        lambda t: formula(*split(t)),
        lambda size: case.tensors(size) | {'temperature': torch.tensor(0.3, dtype=torch.float64)},
    )


CASES = {
    'clip': pair_case(14.3),
    'clip, scale 100': pair_case(100.0),
    'clip, scale 3000': pair_case(3000.0),
    'siglip': pair_case(10.0, -10.0),
    'siglip, scale 100': pair_case(100.0, 5.0),
    'ntxent': tower_case(0.5, 3.0),
    'ntxent, temperature 0.01': tower_case(0.01, 3.0),
    'ntxent, learned temperature': learned_temperature(
        tower_case(0.5, 3.0), lambda t, temperature: ntxent(**t, temperature=temperature)
    ),
    'supcon without labels': view_case(SupConLoss, (2, 1)),
    'supcon, temperature 0.01': view_case(SupConLoss, (2, 1), 'labels', 0.01),
    'supcon one, learned temperature': learned_temperature(
        view_case(SupConLoss, (3, 1), 'labels', mode='one'),
        lambda t, temperature: views(t, temperature, 'one', False, False),
    ),
    'supcon with labels': view_case(SupConLoss, (3, 1), 'labels'),
    'supcon with a mask': view_case(SupConLoss, (2, 1), 'mask'),
    'supcon of one view': view_case(SupConLoss, (1, 1), 'labels'),
    'supcon one': view_case(SupConLoss, (3, 1), mode='one'),
    'supcon one with labels': view_case(SupConLoss, (2, 1), 'labels', mode='one'),
    'supcon one with a mask': view_case(SupConLoss, (2, 1), 'mask', mode='one'),
    'selfcon': view_case(ConLoss, (1, 3)),
    'selfcon with labels': view_case(ConLoss, (1, 3), 'labels'),
    'selfcon supcon_s': view_case(ConLoss, (1, 1), 'labels', leave_out=True, supcon_s=True),
    'selfcon_s_FG': view_case(ConLoss, (1, 3), last=True, selfcon_s_FG=True),
    'selfcon_s_FG with labels': view_case(ConLoss, (1, 2), 'labels', last=True, selfcon_s_FG=True),
    'selfcon_m_FG': view_case(ConLoss, (2, 3), last=True, selfcon_m_FG=True),
    'selfcon_m_FG with labels': view_case(ConLoss, (2, 2), 'labels', last=True, selfcon_m_FG=True),
    'selfcon_m_FG with a mask': view_case(ConLoss, (2, 2), 'mask', last=True, selfcon_m_FG=True),
}


def learned(tensors: Tensors) -> list[str]:
    """The names of the tensors that get a gradient."""
    return [name for name in tensors if name not in ('labels', 'mask')]


def step(function: Callable, tensors: Tensors) -> Tensors:
    """The value of ``function(tensors)`` as 'loss', and by name the gradient of each tensor."""
    leaves = {
        name: tensor.detach().clone().requires_grad_(name in learned(tensors))
        for name, tensor in tensors.items()
    }
    loss = function(leaves)
    loss.backward()
    return {'loss': loss.detach(), **{name: leaves[name].grad for name in learned(leaves)}}
