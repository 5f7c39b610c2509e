"""Multi-crop slices, and DINO's step by them: each (crop, sample) goes through once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memengine.losses.dino import DINOLoss, combine_targets
from memengine.memory.meter import SavedBytes
from memengine.techniques.slices.multi_crop import dino_step, plan_slices
from memengine.testing import assert_same_step

GLOBAL, LOCAL = (8, 8), (4, 4)
SIZES = [GLOBAL] * 2 + [LOCAL] * 4
B, K = 6, 11


def seen(slices):
    return sorted((c, s) for piece in slices for c in piece.crops for s in piece.samples)


@pytest.mark.parametrize('micro_batch_size', [1, 1.5, 2, 3, 5, 6, 7, 12, 100])
@pytest.mark.parametrize('batch_size', [1, 5, 6])
def test_every_crop_of_every_sample_once(micro_batch_size, batch_size):
    slices = plan_slices(SIZES, batch_size, micro_batch_size)
    assert seen(slices) == [(c, s) for c in range(6) for s in range(batch_size)]
    for piece in slices:
        sizes = {SIZES[crop] for crop in piece.crops}
        assert len(sizes) == 1
        height, width = sizes.pop()
        pixels = len(piece.crops) * len(piece.samples) * height * width
        assert pixels <= micro_batch_size * 64


def test_slices_are_few_and_even():
    """The size that the plan is for: 2 x 224 + 8 x 96 pixels, 8 samples."""
    sizes = [(224, 224)] * 2 + [(96, 96)] * 8

    def shapes(micro_batch_size):
        plan = plan_slices(sizes, 8, micro_batch_size)
        return [(len(piece.crops), len(piece.samples)) for piece in plan]

    assert shapes(16) == [(2, 8), (8, 8)]
    assert shapes(8) == [(2, 4)] * 2 + [(8, 4)] * 2
    assert shapes(1) == [(1, 1)] * 16 + [(4, 1)] * 16
    assert shapes(1.5) == [(1, 1)] * 16 + [(8, 1)] * 8
    assert [len(piece.samples) for piece in plan_slices([(4, 4)], 10, 4)] == [3, 3, 4]


def test_crops_of_one_size_need_not_stand_together():
    slices = plan_slices([(8, 8), (4, 4), (8, 8)], 2, 4)
    assert seen(slices) == [(c, s) for c in range(3) for s in range(2)]
    assert [list(piece.crops) for piece in slices] == [[0], [1], [2]]


@pytest.mark.parametrize(
    'arguments',
    [([], 2, 2), ([(4, 4)], 0, 2), ([(4, 4)], 2, 0), ([(4, 4)], 2, 0.5), ([(4, 4)], 2, -1)],
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match='plan_slices needs'):
        plan_slices(*arguments)


class Student(nn.Module):
    """Any resolution to K logits."""

    def __init__(self):
        super().__init__()
        self.rows = self.calls = 0
        self.conv, self.head = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64, K)

    def forward(self, images):
        self.rows += len(images)
        self.calls += 1
        return self.head(torch.tanh(self.conv(images)).mean((2, 3)))


def make(sizes=SIZES):
    torch.manual_seed(0)
    loss = DINOLoss(K, len(sizes), 0.04, 0.07, 3, 10).double()
    crops = [torch.randn(B, 3, *size, dtype=torch.float64) for size in sizes]
    teacher_outputs = [torch.randn(2 * B, K, dtype=torch.float64) for _ in range(5)]
    return Student().double(), loss, crops, teacher_outputs


def train(micro_batch_size, sizes=SIZES):
    student, loss, crops, teacher_outputs = make(sizes)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.1)
    result = {}
    for epoch, teacher_output in enumerate(teacher_outputs):
        optimizer.zero_grad()
        if micro_batch_size == 'plain':
            value = loss(torch.cat([student(crop) for crop in crops]), teacher_output, epoch)
            value.backward()
        else:
            value = dino_step(student, crops, teacher_output, loss, epoch, micro_batch_size)
        result[f'loss {epoch}'] = value
        nn.utils.clip_grad_norm_(student.parameters(), 0.01)
        optimizer.step()
    result |= {f'gradient of {name}': p.grad for name, p in student.named_parameters()}
    return result | student.state_dict() | {'center': loss.center}


@pytest.mark.parametrize('micro_batch_size', [None, 1, 2, 4, 7, 100])
def test_same_step(micro_batch_size):
    assert_same_step(train(micro_batch_size), train('plain'))


def test_same_step_with_crops_of_one_size():
    sizes = [GLOBAL] * 5
    assert_same_step(train(20, sizes), train('plain', sizes))


@pytest.mark.parametrize('fault', ['doubled', 'missing', 'zero'])
def test_a_wrong_gradient_fails_the_comparison(fault):
    expected = train('plain')
    bias = expected['gradient of head.bias']
    wrong = {'doubled': 2 * bias, 'missing': None, 'zero': 0 * bias}[fault]
    with pytest.raises(AssertionError, match=r'head\.bias'):
        assert_same_step(train(2) | {'gradient of head.bias': wrong}, expected)


@pytest.mark.parametrize('micro_batch_size', [None, 1, 3, 100])
def test_every_crop_goes_through_the_student_once(micro_batch_size):
    student, loss, crops, teacher_outputs = make()
    dino_step(student, crops, teacher_outputs[0], loss, 0, micro_batch_size)
    assert student.rows == len(SIZES) * B
    assert student.calls == len(plan_slices(SIZES, B, micro_batch_size or B))


def test_bytes_are_those_of_one_slice():
    def peak(micro_batch_size):
        student, loss, crops, teacher_outputs = make()
        with SavedBytes(student, loss, *crops) as meter:
            if micro_batch_size is None:
                loss(torch.cat([student(c) for c in crops]), teacher_outputs[0], 0).backward()
            else:
                dino_step(student, crops, teacher_outputs[0], loss, 0, micro_batch_size)
        return meter.peak_bytes

    plain, rows = peak(None), 2 * B + 4 * B / 4  # rows of the largest crop
    for micro_batch_size in (1, 2, 3, 6):
        assert peak(micro_batch_size) < 1.2 * plain * micro_batch_size / rows


def test_a_slice_has_its_own_targets_and_keeps_no_others():
    probabilities = torch.randn(2, B, K).softmax(dim=-1)
    combined = combine_targets(probabilities)
    for piece in plan_slices(SIZES, B, 4):
        rows = piece.targets(probabilities)
        assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
        for at, crop in enumerate(piece.crops):
            expected = combined[min(crop, 2)][piece.samples.start : piece.samples.stop]
            assert torch.equal(rows.expand(len(piece.crops), -1, -1)[at], expected)


def test_precision_and_scaler_are_the_callers():
    student, loss, crops, teacher_outputs = make()
    expected = copy.deepcopy(student)
    value = dino_step(student, crops, teacher_outputs[0], copy.deepcopy(loss), 0, 2,
                      backward=lambda part: (8 * part).backward())  # fmt: skip
    want = dino_step(expected, crops, teacher_outputs[0], loss, 0, 2)
    assert value == want
    torch.testing.assert_close(student.head.weight.grad, 8 * expected.head.weight.grad)


def test_another_number_of_crops_is_refused():
    student, loss, crops, teacher_outputs = make()
    with pytest.raises(ValueError, match='expected 6 crops .* got 5 crops of 6 samples'):
        dino_step(student, crops[:5], teacher_outputs[0], loss, 0)
    with pytest.raises(ValueError, match=r'teacher_output \[2B, K\]'):
        dino_step(student, crops, teacher_outputs[0][:B], loss, 0)
