"""``memengine memory``: the peak explained, techniques beside it, all on a page."""

import json
import pickle

import pytest
import torch
from torch import nn

from memengine.engine.cli import memory
from memengine.engine.cli.main import main
from memengine.memory import TrainingStep, write_snapshot
from memengine.technique import techniques
from tests.engine.config.test_planning import OPTIONS, SIMCLR

TRIED = ('accumulation', 'activation_checkpointing', 'data_parallel', 'dropit', 'grad_cache')


pytestmark = pytest.mark.usefixtures('log_level_stays')


@pytest.mark.slow
def test_the_memory_of_a_config(tmp_path, capsys, monkeypatch):
    known = techniques()
    monkeypatch.setattr(memory, 'techniques', lambda: {key: known[key] for key in TRIED})
    command = ['memory', SIMCLR, '--json', '--work-dir', str(tmp_path)]
    assert main([*command, '--cfg-options', *OPTIONS, 'train_dataloader.batch_size=32']) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    plain, found = figures['predicted'], figures['techniques']
    assert sum(plain['by_category'].values()) == plain['peak_bytes']
    assert figures['last']['module'].startswith('backbone.model.')
    assert figures['last']['in_backward']
    saved = [one for one in figures['tensors'] if one['category'] == 'saved activations']
    assert any(one['module'].endswith('mlp.fc1') and 'fc1' in one['code'] for one in saved)
    for key in ('activation_checkpointing', 'grad_cache'):
        assert found[key]['predicted']['peak_bytes'] < plain['peak_bytes']
        assert found[key]['predicted']['flops'] > plain['flops']
    assert found['grad_cache']['options']['optim_wrapper.chunk_size'] == 16  # a quarter of 64
    assert found['dropit']['why_not'].endswith('--cfg-options dropit=True')
    assert 'several processes' in found['data_parallel']['why_not']
    assert 'additive' in found['accumulation']['why_not']
    page = (tmp_path / 'report' / 'index.html').read_text()
    assert page.count('<h2>memory</h2>') == 1 and page.count('<table>') == 2
    assert 'data:image/png;base64,' in page and 'src="http' not in page
    assert all(f'<td>{key}</td>' in page for key in TRIED)


@pytest.mark.gpu
def test_snapshot_of_a_step(tmp_path):
    def build():
        model = nn.Linear(64, 64, device='cuda')
        return TrainingStep(lambda: model(torch.ones(64, 64, device='cuda')).sum(), model)

    path = write_snapshot(build, tmp_path / 'memory' / 'snapshot.pickle')
    snapshot = pickle.loads(path.read_bytes())
    events = [event for trace in snapshot['device_traces'] for event in trace]
    frames = [frame for event in events for frame in event.get('frames', ())]
    assert any(frame['filename'] == __file__ for frame in frames)
