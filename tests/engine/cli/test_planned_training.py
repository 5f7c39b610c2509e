"""What ``memengine plan`` prints trains as it stands, and its step keeps to the budget."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests import recipes
from tests.docs_pages import ROOT

RGB = (  # for models that want three channels
    "[dict(type='torchvision/Resize',size=64),"
    "dict(type='torchvision/Grayscale',num_output_channels=3),dict(type='torchvision/PILToTensor'),"
    "dict(type='torchvision/ToDtype',dtype='float32',scale=True),dict(type='PackInputs')]"
)
PIPELINES = [
    'train_dataloader.dataset.pipeline',
    'val_dataloader.dataset.bank.pipeline',
    'val_dataloader.dataset.queries.pipeline',
]
MNASNET = [
    "model.backbone=dict(_delete_=True,type='TorchvisionBackbone',model_name='mnasnet1_0')",
    *(f'{pipeline}={RGB}' for pipeline in PIPELINES),
]
MSN = (
    "model.backbone=dict(_delete_=True,type='TransformersImage',model_name='vit_msn',"
    'pretrained=False,config=dict(num_channels=1,image_size=16,patch_size=4,hidden_size=64,'
    'num_hidden_layers=4,num_attention_heads=2,intermediate_size=256))'
)
CAIT = (
    "model.backbone=dict(_delete_=True,type='TimmBackbone',model_name='cait_xxs24_224',img_size=16,"
    'patch_size=4,in_chans=1,embed_dim=96,depth=3,num_heads=4)'
)
DETECTOR = [
    'model.backbone=resnet18',
    'model.min_size=64',
    'model.max_size=64',
    'model.num_classes=4',
    *(f'{loader}_dataloader.num_workers=0' for loader in ('train', 'val')),
    *(f'{loader}_dataloader.persistent_workers=False' for loader in ('train', 'val')),
]
# A config, the share of what its step takes as it is, what else is set.
ROWS = {
    'classifier': ('configs/classify_vit.py', 0.7, []),
    'detector': (recipes.FASTER_RCNN, 1.2, ['dropit=None', *DETECTOR]),  # nothing is tried
    'of torchvision': ('configs/classify_vit.py', 0.9, MNASNET),
    # Its BatchNorm forbids slices, and checkpointing leaves more than half.
    'of torchvision, offloaded': ('configs/classify_vit.py', 0.45, MNASNET),
    'of transformers': ('configs/classify_vit.py', 0.7, [MSN]),
    'of timm': ('configs/classify_vit.py', 0.8, [CAIT]),
    'DINO': ('configs/dino_vit.py', 0.9, []),
    # Without blocks to checkpoint, which keeps planning short.
    'SimCLR': ('configs/simclr_vit.py', 0.8, ['model.backbone.depth=1']),
    # Slices of two towers are settled, as it takes minutes to find how many graphs to keep.
    'CLIP': (
        'configs/clip_vit.py',
        0.9,
        ['optim_wrapper.type=GradCacheOptimWrapper', 'optim_wrapper.chunk_size=64'],
    ),
}
DEVICES = [
    pytest.param(
        'cpu',
        marks=pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel'),
    ),
    pytest.param('cuda', marks=pytest.mark.gpu),
]


@pytest.mark.slow
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', ROWS)
def test_a_plan_trains_within_its_budget(name, device, tmp_path, monkeypatch):
    simulated = device == 'cuda' and torch.cuda.get_device_name() == 'Simulated GPU'
    if simulated and name not in ('classifier', 'CLIP'):
        pytest.skip('takes minutes on the simulated GPU, where two others are planned')
    config, share, options = ROWS[name]
    monkeypatch.chdir(tmp_path)
    if name == 'detector':
        recipes.provide(config, monkeypatch)
    hidden = {'CUDA_VISIBLE_DEVICES': ''} if device == 'cpu' else {}
    ran = subprocess.run(
        [sys.executable, '-m', 'tests.engine.cli.planned_training']
        + [str(ROOT / config), str(share), *options],
        env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)} | hidden,
        capture_output=True,
        text=True,
    )
    assert not ran.returncode, ran.stderr
    planned = json.loads(ran.stdout.splitlines()[-1])
    assert planned['trained'] and 0 < planned['peak'] <= planned['budget'], planned
    tried = (
        'optim_wrapper.type',
        'activation_checkpointing',
        'recomputed_activations',
        'activation_offload',
    )
    is_planned = any(option in planned['line'] for option in tried)
    assert is_planned == (share < 1), planned
    assert ('activation_offload' in planned['line']) == ('offloaded' in name), planned
