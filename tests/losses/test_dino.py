"""The DINO loss against its definition."""

import math

import pytest
import torch
from torch.nn import functional as F

from memengine.losses.dino import DINOLoss, combine_targets, sinkhorn_knopp, soft_cross_entropy
from memengine.testing import relative_error, run_ranks

B, K, CROPS = 3, 7, 5


def paper_loss(student, teacher, center, teacher_temp, student_temp):
    """Average of H(teacher view, crop) over samples and pairs of different crops."""
    terms = []
    for view in range(2):
        for crop in range(CROPS):
            if crop == view:
                continue
            for sample in range(B):
                p_t = F.softmax((teacher[view * B + sample] - center) / teacher_temp, dim=-1)
                log_p_s = F.log_softmax(student[crop * B + sample] / student_temp, dim=-1)
                terms.append(-(p_t.detach() * log_p_s).sum())
    return torch.stack(terms).mean()


def make_loss(**kwargs):
    options = dict(
        warmup_teacher_temp=0.04, teacher_temp=0.07, warmup_teacher_temp_epochs=4, nepochs=9
    )
    return DINOLoss(K, CROPS, **{**options, **kwargs}).double()


def outputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(
        CROPS * B, K, dtype=torch.float64, generator=generator, requires_grad=True
    )
    return student, torch.randn(2 * B, K, dtype=torch.float64, generator=generator)


def test_value_gradient_and_center_follow_the_definition_over_several_steps():
    loss = make_loss()
    center = torch.zeros(K, dtype=torch.float64)
    for epoch, temperature in [(0, 0.04), (1, 0.05), (3, 0.07), (8, 0.07)]:
        student, teacher = outputs(epoch)
        expected = paper_loss(student, teacher, center, temperature, 0.1)
        actual = loss(student, teacher, epoch)
        (want,) = torch.autograd.grad(expected, student)
        (got,) = torch.autograd.grad(actual, student)
        assert relative_error(actual, expected) < 1e-12
        assert relative_error(got, want) < 1e-12
        center = 0.9 * center + 0.1 * teacher.mean(dim=0)
        assert relative_error(loss.center[0], center) < 1e-12


@pytest.mark.parametrize(('dtype', 'rows'), [(torch.bfloat16, 514), (torch.float16, 4098)])
def test_the_centre_is_the_mean_of_outputs_in_half_precision(dtype, rows):
    torch.manual_seed(0)
    teacher = (torch.randn(rows, K) + 20).to(dtype)
    loss = make_loss(center_momentum=0.0).float()
    loss.update_center(teacher)
    assert relative_error(loss.center[0], teacher.double().mean(dim=0)) < 1e-6


def test_every_crop_row_alone_adds_up_to_the_batch():
    loss = make_loss()
    student, teacher = outputs()
    targets = loss.targets(teacher, epoch=0)
    combined = combine_targets(targets)
    parts = sum(
        loss.crop_loss(student[crop * B + sample][None], combined[min(crop, 2), sample][None])
        for crop in range(CROPS)
        for sample in range(B)
    )
    assert relative_error(parts / B, loss.batch_loss(student, targets)) < 1e-12


def test_soft_cross_entropy_takes_targets_of_any_mass():
    logits, targets = outputs()[0], torch.rand(CROPS * B, K, dtype=torch.float64)
    expected = -(targets * logits.log_softmax(-1)).sum(-1)
    assert relative_error(soft_cross_entropy(logits, targets), expected) < 1e-12


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_loss_and_center_of_half_precision_outputs_are_computed_in_fp32(dtype):
    """What the network rounds is rounded; the loss adds nothing to it, under autocast either."""
    size, prototypes = 129, 512
    torch.manual_seed(0)
    student = (2 * torch.rand(CROPS * size, prototypes) - 1).to(dtype).requires_grad_()
    teacher = (2 * torch.rand(2 * size, prototypes) - 1).to(dtype)
    loss = DINOLoss(prototypes, CROPS, 0.04, 0.04, 0, 9)
    exact = DINOLoss(prototypes, CROPS, 0.04, 0.04, 0, 9).double()
    with torch.autocast('cpu', dtype):
        actual = loss(student, teacher, 0)
    expected = exact(student.double(), teacher.double(), 0)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(loss.center.double(), exact.center) < 1e-6
    (got,), (want,) = (torch.autograd.grad(each, student) for each in (actual, expected))
    assert relative_error(got.double(), want.double()) < torch.finfo(dtype).eps  # is rounded once


def test_sinkhorn_rows_sum_to_one_and_prototypes_are_used_evenly():
    logits = torch.randn(40, 8, dtype=torch.float64)
    plan = sinkhorn_knopp(logits, temperature=0.5, iterations=200)
    assert torch.allclose(plan.sum(1), torch.ones(40, dtype=torch.float64))
    assert torch.allclose(plan.sum(0), torch.full((8,), 5.0, dtype=torch.float64), rtol=1e-6)
    scaled = (logits / 0.5).exp()  # Sinkhorn only rescales rows and columns, so cross ratios stay
    for table in (plan, scaled):
        table /= table[:1].clone()
        table /= table[:, :1].clone()
    assert torch.allclose(plan, scaled, rtol=1e-6)


def test_sinkhorn_survives_extreme_logits():
    plan = sinkhorn_knopp(torch.tensor([[1e4, 0.0], [1e4, -1e4]]), temperature=0.01)
    assert torch.isfinite(plan).all()


def sinkhorn_by_logarithms(scaled, iterations):
    """In float64, where no sum of exponentials is beyond the range of numbers."""
    plan = scaled.double()
    for _ in range(iterations):
        plan = plan - plan.logsumexp(dim=0, keepdim=True)
        plan = plan - plan.logsumexp(dim=1, keepdim=True)
    return plan.exp()


@pytest.mark.parametrize('spread', [1, 30, 300])
def test_sinkhorn_follows_its_definition_however_far_logits_are_spread(spread):
    torch.manual_seed(0)
    logits = torch.randn(16, 6) + torch.linspace(0, spread, 16)[:, None]
    expected = sinkhorn_by_logarithms(logits / 0.5, 3)
    plan = sinkhorn_knopp(logits, temperature=0.5)
    torch.testing.assert_close(plan.double(), expected, rtol=1e-3, atol=1e-7)
    assert torch.allclose(plan.sum(1), torch.ones(16))


def test_sinkhorn_leaves_masked_prototypes_out():
    logits = torch.randn(8, 4)
    masked = torch.cat([logits, torch.full((8, 1), -torch.inf)], dim=1)
    plan = sinkhorn_knopp(masked, temperature=0.5)
    torch.testing.assert_close(plan[:, :4], sinkhorn_knopp(logits, temperature=0.5))
    assert not plan[:, 4].any()
    with pytest.raises(ValueError, match='iterations must be at least 1, got 0'):
        sinkhorn_knopp(logits, temperature=0.5, iterations=0)


def _targets_on_a_rank(rank, world_size, centering):
    loss = make_loss(centering=centering)
    torch.manual_seed(0)
    logits = torch.randn(2, 4 * world_size, K, dtype=torch.float64)[:, rank::world_size]
    targets = loss.targets(logits.flatten(0, 1), epoch=0)
    return targets, loss.center


@pytest.mark.parametrize('centering', ['center', 'sinkhorn'])
@pytest.mark.parametrize('world_size', [2, 4])
def test_ranks_agree_with_one_process(centering, world_size):
    parts = run_ranks(world_size, _targets_on_a_rank, centering)
    loss = make_loss(centering=centering)
    torch.manual_seed(0)
    logits = torch.randn(2, 4 * world_size, K, dtype=torch.float64)
    expected = loss.targets(logits.flatten(0, 1), epoch=0)
    for rank, (targets, center) in enumerate(parts):
        assert relative_error(targets, expected[:, rank::world_size]) < 1e-12
        assert relative_error(center, loss.center) < 1e-12


def test_temperature_warms_up_linearly():
    loss = make_loss()
    assert [round(loss.temperature(epoch), 6) for epoch in range(6)] == [
        0.04,
        0.05,
        0.06,
        0.07,
        0.07,
        0.07,
    ]
    assert make_loss(warmup_teacher_temp_epochs=1).temperature(0) == 0.04


@pytest.mark.parametrize(
    ('setting', 'value'),
    [
        ('teacher_temp', 0.0),
        ('student_temp', -1.0),
        ('warmup_teacher_temp_epochs', 10),
        ('centering', 'x'),
    ],
)
def test_bad_settings_are_named(setting, value):
    with pytest.raises(ValueError, match=setting):
        make_loss(**{setting: value})


def test_wrong_number_of_crops_is_refused():
    student, teacher = outputs()
    with pytest.raises(ValueError, match='ncrops=5'):
        make_loss()(student[:-1], teacher, 0)


def test_uniform_teacher_and_student_cost_log_k():
    zeros = torch.zeros(CROPS * B, K, dtype=torch.float64)
    assert make_loss()(zeros, zeros[: 2 * B], 0).item() == pytest.approx(math.log(K))
