"""How a batch gets from the training loop to backward: by one typed door, through few files.

Counted are the distinct files of memengine that run from the moment in which the loop gives the
batch to ``train_step`` until the first ``backward()`` begins, in a step like any other: the second
one, as the first one also says things in the log. The model's own files, the backbone's, the head's
and the loss's are among them, and those that see no more of a batch than its device.
"""

import sys
from pathlib import Path

import pytest
import torch
from mmengine.optim import AmpOptimWrapper
from mmengine.optim import OptimWrapper as MMEngineOptimWrapper

import memengine
from memengine.engine.optim import AccumulationOptimWrapper, GradCacheOptimWrapper, OptimWrapper
from memengine.engine.step import SlicedModel, StepRunner, run_step
from memengine.models import Classifier, SimCLR
from memengine.testing import assert_same_step
from tests.engine.test_sliced import ADDITIVE, COUPLED, model_and_batch, wrap

PACKAGE = Path(memengine.__file__).parent
TORCH_BACKWARD = str(Path(torch.autograd.__file__))


def files_until_backward(step):
    """Files of ours with a function that is called in ``step()`` before its first backward."""
    found, has_begun = set(), []

    def see(frame, event, argument):
        name = frame.f_code.co_filename
        if event != 'call' or has_begun:
            return
        if name == TORCH_BACKWARD and frame.f_code.co_name == 'backward':
            has_begun.append(True)
        elif Path(name).is_relative_to(PACKAGE):
            found.add(str(Path(name).relative_to(PACKAGE)))

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert has_begun, 'there was no backward'
    return found


@pytest.mark.parametrize(
    ('kind', 'wrapper', 'settings', 'most'),
    [
        ('DINO', OptimWrapper, {}, 8),
        ('DINO', AccumulationOptimWrapper, dict(micro_batch_size=2), 15),
        (SimCLR, OptimWrapper, {}, 6),
        (SimCLR, GradCacheOptimWrapper, dict(chunk_size=2), 13),
    ],
)
def test_a_batch_passes_few_files(kind, wrapper, settings, most):
    model, data = model_and_batch(kind)
    optim_wrapper = wrap(model, wrapper, **settings)
    model.train_step(data, optim_wrapper)
    found = files_until_backward(lambda: model.train_step(data, optim_wrapper))
    assert 'engine/step.py' in found
    assert len(found) <= most, sorted(found)


def test_the_count_sees_what_is_called():
    model, data = model_and_batch(SimCLR)
    found = files_until_backward(lambda: model(**data, mode='loss')['loss'].backward())
    assert {'models/algorithms/contrastive.py', 'losses/ntxent.py'} <= found
    with pytest.raises(AssertionError, match='no backward'):
        files_until_backward(lambda: model.embed(data['inputs']))


def test_models_and_wrappers_are_known_by_type():
    for kind in [*COUPLED, *ADDITIVE]:
        model, _ = model_and_batch(kind)
        assert isinstance(model, SlicedModel)
        assert model.coupled != model.additive
    for kind, settings in (
        (OptimWrapper, {}),
        (AccumulationOptimWrapper, dict(micro_batch_size=1)),
        (GradCacheOptimWrapper, dict(chunk_size=1)),
    ):
        assert isinstance(wrap(model, kind, **settings), StepRunner)
    assert not isinstance(wrap(model, MMEngineOptimWrapper), StepRunner)
    assert not isinstance(torch.nn.Linear(1, 1), SlicedModel)


@pytest.mark.parametrize('kind', [SimCLR, Classifier])
def test_wrappers_of_mmengine_carry_out_the_plain_step(kind):
    expected, data = model_and_batch(kind)
    model, _ = model_and_batch(kind)
    ours, theirs = wrap(expected), wrap(model, MMEngineOptimWrapper)
    for _ in range(2):
        assert_same_step(run_step(model, data, theirs), run_step(expected, data, ours))
    assert_same_step(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert not issubclass(AmpOptimWrapper, StepRunner)


def test_nothing_is_decided_by_an_attribute_that_happens_to_be_there():
    places = [
        'engine/step.py',
        'engine/runner/runner.py',
        'engine/runner/wrapping.py',
        'engine/runner/loading.py',
        'engine/runner/saving.py',
        'engine/hooks/algorithm.py',
        'engine/hooks/checkpoint.py',
        'engine/optim/optim_wrapper.py',
        'engine/optim/sliced.py',
        'engine/optim/schedulers.py',
        'engine/wrappers/disco.py',
        'engine/wrappers/ddp.py',
        *(f'losses/{path.name}' for path in (PACKAGE / 'losses').glob('*.py')),
        *(f'techniques/slices/{p.name}' for p in (PACKAGE / 'techniques/slices').glob('*.py')),
    ]
    for place in places:
        text = (PACKAGE / place).read_text()
        assert 'hasattr(' not in text and 'getattr(' not in text, place
