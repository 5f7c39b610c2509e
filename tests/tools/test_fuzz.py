"""The fuzz: a seed draws the same cases, a fault is found, and its script shows it by itself."""

import random
import subprocess
import sys

import pytest
import torch

from tests.docs_pages import ROOT

sys.path.insert(0, str(ROOT / 'tools'))

import fuzz
from fuzz_cases import OfProgram, Techniques
from fuzz_configs import OfConfig
from fuzz_programs import draw_program
from same_runs import Data, Runs
from same_training import PlainTraining, Way, outcome, shaken

from memengine.techniques import quantize_activations

WRONG = Techniques(
    ('model.head.bias.register_hook(lambda gradient: 2 * gradient)',), 'plain_step', ()
)


def test_a_seed_draws_the_same_cases():
    first, again = ([fuzz.draw_case(3, n).script() for n in range(20)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 20


def test_a_fault_is_found_and_made_small(tmp_path):
    case = fuzz.made_smaller(OfProgram(draw_program(random.Random(2)), WRONG))
    assert fuzz.outcome_of(case).startswith('wrong')
    assert case.techniques.apply == WRONG.apply
    assert not case.program.calls
    path = tmp_path / 'case.py'
    path.write_text(case.script())
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert ran.returncode == 1 and 'wrong: AssertionError' in ran.stderr


RIGHT = {'optim_wrapper': {'type': 'GradCacheOptimWrapper', 'chunk_size': 2}}
OTHER = {'model': {'loss': {'temperature': 0.4}}}


def of_config(changes):
    sizes = {'img_size': 8, 'patch_size': 8, 'embed_dim': 4, 'num_heads': 1, 'depth': 1}
    model = {'type': 'SimCLR', 'head': {'type': 'ProjectionHead', 'out_dim': 4}}
    model['backbone'] = {'type': 'TimmBackbone', 'model_name': 'vit_tiny_patch16_224', **sizes}
    model['loss'] = {'type': 'NTXentLoss', 'temperature': 0.3}
    data = Data((8, 8), samples=4, batch_size=3)
    return OfConfig(Runs(model, data, 'fp32', {'clip_grad': {'max_norm': 0.1}}), changes)


def test_a_config_that_trains_something_else_is_found(tmp_path):
    assert fuzz.outcome_of(of_config(RIGHT)) == 'same'
    path = tmp_path / 'case.py'
    path.write_text(of_config({**RIGHT, **OTHER}).script())
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert ran.returncode == 1 and 'wrong: AssertionError: the first' in ran.stderr


def test_a_config_is_made_smaller(monkeypatch):
    def is_wrong(case):
        return 'wrong' if case.changes.get('model') == OTHER['model'] else 'same'

    monkeypatch.setattr(fuzz, 'outcome_of', is_wrong)
    case = fuzz.made_smaller(of_config({**RIGHT, **OTHER}))
    assert case.changes == OTHER and not case.runs.settings
    assert case.runs.precision == 'float64' and case.runs.data.samples == 3


def test_a_lossy_technique_has_the_plain_loss_and_state_bit_for_bit():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    plain = PlainTraining(shaken(model), [torch.randn(4, 4).double() for _ in range(2)])
    coarse = [lambda model: quantize_activations(model, 1, min_numel=0)]
    assert outcome(plain, Way(coarse, is_lossy=True)) == 'lossy'
    shifted = [*coarse, lambda model: model[1].running_mean.add_(1e-12)]
    assert outcome(plain, Way(shifted, is_lossy=True)).startswith('wrong: 1.running_mean')
    gone = [lambda model: model[0].bias.register_hook(lambda gradient: gradient * float('nan'))]
    assert 'gradient 0 of 0.bias' in outcome(plain, Way(gone, is_lossy=True))


@pytest.mark.slow  # some five minutes of processor time in all
@pytest.mark.parametrize('first', range(0, 520, 104))
def test_random_cases_learn_what_the_plain_step_does(first, tmp_path):
    words = ['--minutes', '60', '--first', str(first), '--cases', '104', '--out', str(tmp_path)]
    assert fuzz.main(words) == 0
