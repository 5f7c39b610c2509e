"""Training under a budget: planned once, remembered, and the same weights."""

import json
from functools import reduce
from operator import getitem

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import Dataset

from memengine.engine.cli.main import main
from memengine.engine.config.check import ConfigError, check_config
from memengine.engine.config.file import load_config
from memengine.engine.config.memory_budget import PLAN_FILE, keep_budget
from memengine.engine.config.planning import Planner, budget_for
from memengine.registry import DATASETS, MODELS
from tests.engine.config.test_planning import DINO, OPTIONS, planner


def train(folder, *options):
    command = ['train', DINO, '--max-iters', '2', '--work-dir', str(folder), '--quiet']
    name = f'experiment_name={folder.name}'  # loggers go by it
    options = [*OPTIONS, name, 'train_dataloader.batch_size=32', *options]
    assert main([*command, '--cfg-options', *options]) == 0
    return torch.load(folder / 'iter_2.pth', weights_only=False)['state_dict']


@pytest.mark.slow
def test_the_same_weights(tmp_path):
    plain = planner(DINO).plain().peak_bytes
    budget = f'{budget_for(int(0.93 * plain)) / 2**20:.3f}MiB'
    planned = train(tmp_path / 'planned', f'memory_budget={budget}')
    for name, value in train(tmp_path / 'plain').items():
        assert torch.equal(value, planned[name]), name
    kept = json.loads((tmp_path / 'planned' / PLAN_FILE).read_text())
    assert kept['options']
    config = load_config(tmp_path / 'planned' / 'dino_vit.py')
    for name, value in kept['options'].items():
        assert reduce(getitem, name.split('.'), config) == value


def config(folder, **options):
    cfg = load_config(DINO, {'work_dir': str(folder), **options})
    check_config(cfg)
    return cfg


def test_a_plan_is_remembered(tmp_path, monkeypatch):
    cfg = config(tmp_path, memory_budget='1GiB')
    assert keep_budget(cfg) == 'memory_budget=1GiB: the step fits as it is'
    monkeypatch.setattr('memengine.engine.config.memory_budget.Planner', None)
    assert keep_budget(config(tmp_path, memory_budget='1GiB'))
    with pytest.raises(TypeError):  # it is asked again
        keep_budget(config(tmp_path, memory_budget='2GiB'))


@pytest.mark.parametrize('left', ['{"key": "8d', '[]', '{"key": "", "bytes": 1}'])
def test_a_plan_that_cannot_be_read_is_made_anew(tmp_path, left):
    """A process that ended while it wrote one; another version's."""
    (tmp_path / PLAN_FILE).write_text(left)
    assert keep_budget(config(tmp_path, memory_budget='1GiB'))
    assert json.loads((tmp_path / PLAN_FILE).read_text())['options'] == {}


@pytest.mark.slow
def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='nothing fits 1MiB'):
        keep_budget(config(tmp_path, memory_budget='1MiB'))
    with pytest.raises(ConfigError, match="a size such as '20GiB'"):
        config(tmp_path, memory_budget=20)
    with pytest.raises(ConfigError, match="'least', 'balanced', 'fastest'"):
        config(tmp_path, memory=2)
    with pytest.raises(ConfigError, match='leave one out'):
        keep_budget(config(tmp_path, memory_budget='1GiB', memory='least'))
    assert (
        keep_budget(config(tmp_path, memory='fastest')) == 'memory=fastest: the step fits as it is'
    )


@DATASETS.register_module()
class SentencesByLength(Dataset):
    """Sentences [L, 16], the shortest first, as many sets of texts are sorted."""

    def __init__(self, longest=64, form='tensor'):
        self.longest, self.form = longest, form

    def __len__(self):
        return 64

    def __getitem__(self, index):
        sentence = torch.randn(min(index + 1, self.longest), 16)
        forms = dict(tensor=sentence, array=sentence.numpy(), list=sentence.tolist())
        return forms[self.form]


def padded(sentences):
    sentences = [torch.as_tensor(sentence) for sentence in sentences]
    return dict(inputs=nn.utils.rnn.pad_sequence(sentences, batch_first=True))  # [B, L, 16]


@MODELS.register_module()
class OfSentences(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, inputs, mode='tensor'):
        outputs = self.layers(inputs)
        return dict(loss=outputs.square().mean()) if mode == 'loss' else outputs


def of_sentences(folder, longest, form, **options):
    loader = dict(batch_size=32, num_workers=0, collate_fn=padded)
    sampler = dict(type='DefaultSampler', shuffle=True)
    return Config(
        dict(
            default_scope='memengine',
            work_dir=str(folder),
            model=dict(type='OfSentences'),
            train_cfg=dict(by_epoch=True, max_epochs=1),
            train_dataloader=dict(
                dataset=dict(type='SentencesByLength', longest=longest, form=form),
                sampler=sampler,
                **loader,
            ),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
            **options,
        )
    )


@pytest.mark.parametrize('form', ['tensor', 'array', 'list'])
def test_sentences_of_other_lengths_are_planned_for(tmp_path, form):
    """Only the first four were, which are short in a sorted set: a tenth of what a step took."""
    cfg = of_sentences(tmp_path, 64, form, memory_budget='1GiB')
    plain = Planner(cfg).plain()
    assert plain.by_category['batch'] == 32 * 64 * 16 * 4  # the longest is among them
    planned = 'memory_budget=1GiB: the step fits as it is'
    said = keep_budget(cfg)
    assert said.startswith(f'{planned}; samples are of different sizes')
    assert keep_budget(cfg) == said  # as it is remembered
    assert keep_budget(of_sentences(tmp_path, 1, form, memory_budget='1GiB')) == planned
