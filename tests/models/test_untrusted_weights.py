"""Weights that libraries read for us run nothing, whatever these libraries do by themselves."""

import json
import os
import pickle

import numpy as np
import pytest
import timm
import torch

from memengine.datasets.tokenizers import TransformersTokenizer
from memengine.models import CausalLanguageModel, TimmBackbone, TorchvisionDetector
from memengine.models.backbones.text_libraries import OpenClipText, TransformersText
from tests.engine import malice

VIT = dict(model_name='deit_tiny_patch16_224', img_size=32, embed_dim=12, depth=1, num_heads=2)


@pytest.fixture
def attack(tmp_path, monkeypatch):
    """Runs nothing, or the test fails."""
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    yield malice.Attack(tmp_path / 'traces')
    assert not (tmp_path / 'traces').exists()


def arrays(attack, path):
    """NumPy's archive of an array of objects."""
    np.savez(path, **{'embedding/kernel': np.array([attack], dtype=object)})


def one_array(attack, path):
    """NumPy's file of an array of objects."""
    np.save(path, np.array([attack], dtype=object))


FORMS = [*((make, 'pth') for make in malice.FILES), (arrays, 'npz'), (one_array, 'npy')]


@pytest.mark.fault(
    "weights with code in them as a backbone's `checkpoint_path`, with any timm",
    'the code is not run; nothing advises to switch safety off',
)
@pytest.mark.parametrize(('make', 'suffix'), FORMS)
def test_a_backbone_s_file_runs_nothing(tmp_path, attack, make, suffix):
    file = tmp_path / f'gift.{suffix}'
    make(attack, file)
    with pytest.raises(ValueError, match='gift') as caught:
        TimmBackbone(checkpoint_path=str(file), **VIT)
    assert 'weights_only=False' not in str(caught.value)


def test_a_backbone_s_folder_runs_nothing(tmp_path, attack):
    malice.write_sharded(tmp_path / 'gift.dcp')
    malice.metadata_itself(attack, tmp_path / 'gift.dcp')
    with pytest.raises(ValueError, match='gift'):
        TimmBackbone(checkpoint_path=str(tmp_path / 'gift.dcp'), **VIT)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / 'gift.pth')
    with pytest.raises((ValueError, FileNotFoundError), match='gift'):
        TimmBackbone(checkpoint_path=str(tmp_path / 'gift.pth'), **VIT)


@pytest.mark.parametrize('make', malice.FILES)
def test_a_file_in_timm_s_settings_runs_nothing(tmp_path, attack, make):
    make(attack, tmp_path / 'gift.pth')
    settings = dict(file=str(tmp_path / 'gift.pth'))
    with pytest.raises(ValueError, match='deit_tiny') as caught:
        TimmBackbone(pretrained=True, pretrained_cfg_overlay=settings, **VIT)
    assert 'weights_only=False' not in str(caught.value)


def test_timm_as_it_is_runs_what_is_in_a_file(tmp_path):
    """The attack is one, where timm is told not to look; older ones do so by themselves."""
    malice.torch_file(malice.Attack(tmp_path / 'traces'), tmp_path / 'gift.pth')
    model = timm.create_model(VIT['model_name'])
    with pytest.raises((RuntimeError, pickle.UnpicklingError, AttributeError, TypeError)):
        timm.models.load_checkpoint(model, str(tmp_path / 'gift.pth'), weights_only=False)
    assert (tmp_path / 'traces').exists()


def test_a_detector_s_file_runs_nothing(tmp_path, attack):
    malice.torch_file(attack, tmp_path / 'gift.pth')
    with pytest.raises(ValueError, match='gift'):
        TorchvisionDetector(
            'FasterRCNN', 3, backbone='resnet18', backbone_checkpoint=str(tmp_path / 'gift.pth')
        )


def of_transformers(folder, attack):
    """A model's folder with its weights as a pickle, and code of its own that loads with it."""
    traces = attack.traces
    folder.mkdir()
    auto = {'AutoConfig': 'own.Own', 'AutoModel': 'own.Own', 'AutoTokenizer': ['own.Own', None]}
    auto['AutoModelForCausalLM'] = 'own.Own'
    (folder / 'config.json').write_text(json.dumps({'model_type': 'own', 'auto_map': auto}))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'auto_map': auto}))
    (folder / 'own.py').write_text(f'import os\nos.mkdir({str(traces)!r})\nclass Own: pass\n')


BUILT = (
    TransformersText,
    CausalLanguageModel,
    TransformersTokenizer,
)


@pytest.mark.fault(
    'a folder of transformers with code of its own as model or tokenizer', 'the code is not run'
)
@pytest.mark.parametrize('build', BUILT)
def test_code_in_a_model_s_folder_is_not_run(tmp_path, attack, build):
    pytest.importorskip('transformers')
    of_transformers(tmp_path / 'gift', attack)
    with pytest.raises(ValueError, match='gift'):
        build(model_name=str(tmp_path / 'gift'))


@pytest.mark.parametrize('build', BUILT[:2])
def test_weights_in_a_model_s_folder_run_nothing(tmp_path, attack, build):
    pytest.importorskip('transformers')
    settings = dict(model_type='gpt2', n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8)
    (tmp_path / 'gift').mkdir()
    (tmp_path / 'gift' / 'config.json').write_text(json.dumps(settings))
    torch.save({'wte.weight': attack}, tmp_path / 'gift' / 'pytorch_model.bin')
    with pytest.raises(ValueError, match='gift'):
        build(model_name=str(tmp_path / 'gift'))


@pytest.mark.slow  # the smallest model that it has is large
def test_open_clip_s_weights_run_nothing(tmp_path, attack):
    pytest.importorskip('open_clip')
    malice.torch_file(attack, tmp_path / 'gift.pt')
    with pytest.raises(ValueError, match='RN50'):
        OpenClipText('RN50', pretrained=str(tmp_path / 'gift.pt'))
