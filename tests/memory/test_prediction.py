"""The predicted peak of a training step, against sums that follow from its shapes."""

import copy
import dataclasses
import json
import os
import statistics
import subprocess
import sys

import pytest
import torch
from torch import distributed as dist
from torch import nn

from memengine._torch_private.distributed import CAN_SHARD_ON_CPU, pretended_ranks
from memengine._torch_private.ops import cpu_multiplies_bfloat16
from memengine.memory import (
    TrainingStep,
    UnpredictableError,
    cpu_workspaces,
    measure,
    predict,
    timeline,
)
from memengine.memory.live_memory import KnownOperators, LiveMemory
from memengine.memory.prediction import carried_out, prediction_of
from memengine.techniques import offload_activations, recompute_activations
from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    checkpoint_activations,
)
from memengine.testing import run_ranks
from tests.docs_pages import ROOT

MIB = 2**20


def perceptron(width=1024, rows=2048, loss=lambda out: out.square().mean()):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    model.teacher = nn.Linear(width, width).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(rows, width)

    def run():
        loss(model[:3](batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(run, model, optimizer, batch)


def test_categories():
    predicted = predict(perceptron)
    layer = 4 * (1024 * 1024 + 1024)
    found = predicted.by_category
    assert found['parameters'] == 2 * layer
    assert found['teacher'] == layer
    assert found['optimiser state'] == 4 * layer + 4 * 4  # and the counts of steps
    assert found['batch'] == 8 * MIB
    assert found['saved activations'] >= 8 * MIB  # the output of ReLU
    assert sum(found.values()) == predicted.peak_bytes
    assert predicted.flops == 5 * 2 * 2048 * 1024 * 1024  # no gradient of the batch
    assert predicted.by_module['1'] == 8 * MIB
    assert not predicted.guessed


def repeats_its_layers():
    """Layers, and a teacher, that are deep copies."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(0, 1), nn.BatchNorm1d(32))
    model.teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, 16, 32)

    def run():
        (model[:3](batch) - model.teacher(batch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(run, model, optimizer, batch)


def test_models_with_deep_copies():
    """They were refused, as if what they do depended on values."""
    found = predict(repeats_its_layers).by_category
    parameters = [*repeats_its_layers().model.parameters()]
    for name, is_trained in (('parameters', True), ('teacher', False)):
        assert found[name] == sum(p.nbytes for p in parameters if p.requires_grad is is_trained)


def test_to_divide_by_what_follows_from_a_guess_is_refused():
    step = perceptron(width=8, rows=4)
    step.run = lambda: 1 / (1 - torch.rand(()).item())
    with pytest.raises(UnpredictableError, match='division by zero'):
        predict(lambda: step)


def test_a_model_that_is_cast_when_it_is_built():
    def build():
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        model[1].weight = model[0].weight
        model.bfloat16().to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(2048, 1024, dtype=torch.bfloat16)

        def run():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return TrainingStep(run, model, optimizer, batch)

    numbers = 1024 * 1024 + 2 * 1024  # the weight is tied
    found = predict(build).by_category
    assert found['parameters'] == 2 * numbers
    assert found['optimiser state'] == 4 * numbers + 3 * 4  # and the counts of steps


@pytest.mark.parametrize('store', ['disk', 'host'])
def test_bytes_that_are_offloaded(store):
    handles = []

    def build():
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 512))
        handles.append(offload_activations(model, store))
        optimizer, batch = torch.optim.SGD(model.parameters()), torch.randn(512, 1024)
        return TrainingStep(lambda: model(batch).sum().backward(), model, optimizer, batch)

    predicted = predict(build)
    assert handles[0].moved_bytes == (4 * MIB, 4 * MIB)  # of two steps, what tanh gave
    assert predicted.offloaded_bytes == (4 * MIB if store == 'disk' else 0)  # no host beside a CPU


def test_the_peak_of_the_course_is_the_predicted_one_and_explained():
    course = timeline(lambda: perceptron(loss=lambda out: out.sum()))
    predicted = course.predicted
    assert predicted == predict(lambda: perceptron(loss=lambda out: out.sum()))
    at_peak = {name: values[course.peak] for name, values in course.live.items()}
    assert {name: nbytes for name, nbytes in at_peak.items() if nbytes} == predicted.by_category
    assert max(map(sum, zip(*course.live.values(), strict=True))) == predicted.peak_bytes
    layer = 4 * (1024 * 1024 + 1024)
    for moment in (0, -1):  # no gradient is there before the step, nor after it
        assert course.live['parameters'][moment] == 2 * layer
        assert not course.live['gradients'][moment]
    assert max(course.live['gradients']) == 2 * layer
    relu = next(one for one in course.tensors if one.op.startswith('aten.relu'))
    assert (relu.module, relu.shape, relu.in_backward) == ('1', (2048, 1024), False)
    assert relu.line.startswith('tests/memory/test_prediction.py:')
    assert 'model[:3](batch)' in relu.code
    # The gradient of ReLU is that of its module and line, though torch's engine computes it.
    gradient = next(one for one in course.tensors if one.in_backward and one.module == '1')
    assert (gradient.code, gradient.category) == (relu.code, 'transients')


def test_numbers_that_follow_from_constants_are_known():
    seen = []

    def build():
        step = perceptron()
        seen.extend(torch.linspace(0, 0.5, 3).repeat(2).unique().tolist())
        return step

    assert predict(build).guessed == 0
    assert seen == [0, 0.25, 0.5]


def test_numbers_that_do_not_are_counted():
    assert predict(lambda: perceptron(loss=lambda out: out.mean() * out.max().item())).guessed


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason='another library multiplies')
@pytest.mark.parametrize(
    ('is_deep', 'packed'),
    [
        (False, 100 + 64 + 100 + 256),  # of rows and columns
        (True, 100),  # of few columns nothing, of few rows only these
    ],
)
@pytest.mark.parametrize('threads', [1, 2])
def test_buffers_of_products_are_kept_where_a_larger_one_is_needed(
    is_deep, packed, threads, monkeypatch
):
    monkeypatch.setattr(cpu_workspaces, '_has_deep_panels', lambda: is_deep)
    monkeypatch.setattr(cpu_workspaces, '_known_threads', threads)
    x, weights = torch.randn(100, 128), [torch.randn(128, n) for n in (64, 256, 200)]

    def build():
        step = perceptron()
        return dataclasses.replace(step, run=lambda: [x @ weight for weight in weights])

    # Rows of 128 numbers; the third product fits the second one's buffer.
    assert predict(build).by_category['workspaces'] == 4 * 128 * packed * threads


def convolved(*layer, batch, **settings):
    """What libraries keep for a step of one layer that gives its weight a gradient."""

    def build():
        model = nn.Conv2d(*layer, **settings)
        images = torch.randn(batch, layer[0], 32, 32)

        def run():
            model(images).sum().backward()

        return TrainingStep(run, model, torch.optim.SGD(model.parameters()), images)

    return predict(build).by_category.get('workspaces', 0)


def test_what_onednn_keeps_for_a_convolution_depends_on_who_carries_it_out(monkeypatch):
    monkeypatch.setattr(cpu_workspaces, '_known_threads', 1)
    few, many = (convolved(8, 8, 1, batch=batch) for batch in (8, 16))
    assert few == 0 < many  # with one thread torch multiplies few images itself
    monkeypatch.setattr(cpu_workspaces, '_known_threads', 2)
    assert convolved(8, 8, 1, batch=8) > 0
    small, large = (convolved(3, 256, side, batch=8, stride=side) for side in (8, 16))
    assert large > small + MIB  # a patch embedding's gradient is a product


def test_shapes_that_depend_on_values_are_refused():
    with pytest.raises(UnpredictableError, match='measure it'):
        predict(lambda: perceptron(loss=lambda out: out[out > 0].sum()))
    with pytest.raises(UnpredictableError, match='measure it'):  # what is read is taken for 1
        predict(lambda: perceptron(loss=lambda out: [out.sum()][int(out.min())]))


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 1e-5))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(('part', 'is_guessed'), [(nn.Dropout, True), (LayerScale, False)])
def test_that_a_factor_without_a_gradient_has_two_values_is_guessed(part, is_guessed):
    def build():
        model = nn.Sequential(nn.Linear(64, 64), part(), nn.Linear(64, 64))
        handle, batch = recompute_activations(model), torch.randn(32, 64)

        def run():
            assert handle
            model(batch).sum().backward()

        return TrainingStep(run, model, torch.optim.SGD(model.parameters()), batch)

    assert bool(predict(build).guessed) == is_guessed


def test_indices_of_a_pool_take_what_their_bound_says():
    def build():
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Flatten())
        handle, batch = recompute_activations(model), torch.randn(64, 3, 32, 32)

        def run():
            assert handle
            model(batch).sum().backward()

        return TrainingStep(run, model, torch.optim.SGD(model.parameters()), batch)

    assert predict(build).guessed == 0


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(16 * 14 * 14, 10))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    batch = torch.randn(8, 3, 16, 16)

    def run():
        model[4].weight.requires_grad_(len(optimizer.state) > 0)  # not in the first step
        for part in batch.split(4):
            nn.functional.cross_entropy(model(part), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(run, model, optimizer, batch)


def attention_of_two_precisions():
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])
    handle = checkpoint_activations(model, ['0', '2'], budget=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, 16, 32)

    def run():
        assert handle.names
        for is_half in (False, True):
            with torch.autocast('cpu', torch.bfloat16, enabled=is_half):
                loss = model[1:](batch) if is_half else model(batch)
            loss.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(run, model, optimizer, batch)


def test_operators_that_are_known_are_not_carried_out_again(monkeypatch):
    known, carried = KnownOperators(), []
    first = prediction_of(carried_out(attention_of_two_precisions, known))
    carry_out = LiveMemory._carry_out

    def note(self, func, *arguments):
        carried.append(func)
        return carry_out(self, func, *arguments)

    monkeypatch.setattr(LiveMemory, '_carry_out', note)
    assert prediction_of(carried_out(attention_of_two_precisions, known)) == first
    again = len(carried)
    assert prediction_of(carried_out(attention_of_two_precisions)) == first
    assert again < (len(carried) - again) / 5  # numbers that are known, what values decide


@pytest.mark.parametrize('build', [perceptron, convolutions, attention_of_two_precisions])
def test_operators_that_follow_from_their_first_results_change_nothing(build, monkeypatch):
    followed = timeline(build)
    monkeypatch.setattr('memengine.memory.live_memory.inputs_by_shape', lambda *_: None)
    each = timeline(build)
    assert followed.predicted == each.predicted
    most = [{name: max(n) for name, n in course.live.items()} for course in (followed, each)]
    assert most[0] == most[1]


def pointwise_and_depthwise():
    """The peak is that of a convolution that copies what it reads and writes."""
    model = nn.Sequential(nn.Conv2d(24, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64))
    batch = torch.randn(64, 24, 32, 32)

    def run():
        model(batch).sum().backward()

    return TrainingStep(run, model, torch.optim.SGD(model.parameters()), batch)


def transformer_in_bfloat16():
    """Its products' kernels take more than it does."""
    model = nn.TransformerEncoderLayer(128, 4, 512, activation='gelu', batch_first=True)
    batch = torch.randn(16, 50, 128)

    def run():
        with torch.autocast('cpu', torch.bfloat16):
            model(batch).sum().backward()

    return TrainingStep(run, model, torch.optim.SGD(model.parameters()), batch)


MEASURE = """
from memengine.memory import measure, predict
from tests.memory.test_prediction import {build}

predicted = predict({build})  # which imports what the step needs
small = [bytearray(4000) for _ in range(20_000)]
small = small[::2500]  # between them are holes in which blocks of the step would find room
measured = measure({build})
print(predicted.peak_bytes, measured.peak_bytes, measured.held_bytes)
"""


def in_a_process_of_its_own(build):
    """The predicted peak, the measured one, and what is held between steps."""
    ran = subprocess.run(
        [sys.executable, '-c', MEASURE.format(build=build.__name__)],
        cwd=ROOT,
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return map(int, ran.stdout.split())


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel')
def test_measured_in_a_process_of_its_own():
    predicted, peak, held = in_a_process_of_its_own(perceptron)
    # A batch, a teacher, two layers with AdamW's states; what MKL keeps differs by processor.
    assert 36 * MIB < held < 39 * MIB
    assert peak == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel')
def test_what_convolutions_copy_is_predicted_as_it_is_measured():
    predicted, peak, _ = in_a_process_of_its_own(pointwise_and_depthwise)
    assert peak == pytest.approx(predicted, rel=0.05)


def dilated_beyond_its_images():
    """A filter of which most lies beside the image, and whose gradient is a product."""
    model = nn.Sequential(
        nn.Conv2d(64, 192, 3, padding=4, dilation=4), nn.Conv2d(192, 64, 3, padding=2, dilation=2)
    )
    images = torch.randn(256, 64, 2, 2)

    def run():
        model(images).square().mean().backward()

    return TrainingStep(run, model, torch.optim.SGD(model.parameters()), images)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason='another library computes')
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel')
def test_dilated_convolutions_are_predicted_as_they_are_measured():
    """What they keep once for products is more than all else of a small step."""
    predicted, peak, _ = in_a_process_of_its_own(dilated_beyond_its_images)
    assert peak == pytest.approx(predicted, rel=0.15)


def recurrent(rows=32):
    model, sequences = nn.LSTM(256, 256, 2, batch_first=True), torch.randn(rows, 64, 256)

    def run():
        model(sequences)[0].square().mean().backward()

    return TrainingStep(run, model, torch.optim.SGD(model.parameters()), sequences)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason='another library computes')
def test_what_onednn_keeps_for_an_lstm_is_counted():
    """Torch's fake operator has nothing in its place: gates and cells, of two layers."""
    (few, many) = (predict(lambda rows=rows: recurrent(rows)).peak_bytes for rows in (32, 64))
    assert many - few > 2 * 32 * 64 * 5 * 256 * 4


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason='another library computes')
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel')
def test_an_lstm_is_predicted_as_it_is_measured():
    predicted, peak, _ = in_a_process_of_its_own(recurrent)
    assert peak == pytest.approx(predicted, rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not cpu_multiplies_bfloat16(), reason='the processor does not multiply bf16')
def test_kernels_of_bfloat16_are_predicted_as_they_are_measured():
    predicted, peak, held = in_a_process_of_its_own(transformer_in_bfloat16)
    assert held > peak / 2
    assert peak == pytest.approx(predicted, rel=0.1)


COLLECTIVES = {
    'all_gather': lambda part, whole: dist.all_gather_into_tensor(whole, part),
    'reduce_scatter': lambda part, whole: dist.reduce_scatter_tensor(part, whole),
    'all_reduce': lambda part, whole: dist.all_reduce(part),
}


def communicating(name):
    part, whole = torch.ones(MIB), torch.ones(2 * MIB)

    def run():
        COLLECTIVES[name](part, whole)

    return TrainingStep(run, nn.Linear(4, 4), batch=[part, whole])


def measured_of_collectives(rank, world_size):
    # Gloo's thread lets go of a copy when it comes to it: beside the next copy the peak is higher,
    # after the next measurement has begun that one's is lower.
    return {
        name: statistics.median(
            measure(lambda name=name: communicating(name)).peak_bytes for _ in range(5)
        )
        for name in COLLECTIVES
    }


GATHERS_WITHOUT_VALUES = pytest.mark.skipif(
    not CAN_SHARD_ON_CPU, reason='torch 2.6 gathers nothing that has no values'
)


@GATHERS_WITHOUT_VALUES
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel')
def test_what_collectives_copy_is_predicted_as_it_is_measured():
    for measured in run_ranks(2, measured_of_collectives):
        for name, nbytes in measured.items():
            with pretended_ranks(2):
                predicted = predict(lambda name=name: communicating(name))
            assert nbytes == pytest.approx(predicted.peak_bytes, abs=MIB), name
            assert predicted.by_category['workspaces'] >= 2 * MIB


@GATHERS_WITHOUT_VALUES
def test_a_collective_goes_on_beside_what_is_computed_next():
    def build():
        step = communicating('all_gather')

        def run():
            step.run()
            torch.ones(MIB)
            step.run()

        return dataclasses.replace(step, run=run)

    with pretended_ranks(2):
        alone, beside = predict(lambda: communicating('all_gather')), predict(build)
    assert beside.by_category['workspaces'] == alone.by_category['workspaces'] == 8 * MIB
    assert beside.by_category['transients'] == 4 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel')
def test_what_techniques_leave_is_predicted_as_it_is_measured():
    ran = subprocess.run(
        [sys.executable, '-m', 'tests.memory.beside_measured'],
        cwd=ROOT,
        env=os.environ | {'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    steps = {(model, how): sizes for model, how, *sizes in map(json.loads, ran.stdout.splitlines())}
    errors = {name: predicted / measured - 1 for name, (predicted, measured) in steps.items()}
    # What lies free between the process's small blocks is no tensor's: up to a MiB of any step.
    lowest = {name: -max(0.01, MIB / measured) for name, (_, measured) in steps.items()}
    assert len(errors) >= 11, errors
    assert all(lowest[name] < error < 0.05 for name, error in errors.items()), errors
    assert statistics.median(map(abs, errors.values())) < 0.02, errors
    most = steps['vit', 'plain'][1]
    for how in ('recomputed', '8 bits', 'recomputed, 4 bits', 'offloaded'):
        assert steps['vit', how][1] < 0.85 * most, how
