"""What an iteration of the Runner asks of a device beside its step: one wait, for the guard."""

from collections import Counter

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook

from memengine._torch_private.ops import pytree
from memengine.engine import Runner
from memengine.models import Classifier, SimCLR
from tests.composition import Images

pytestmark = pytest.mark.gpu


class Counting(Hook):
    """Counts from the fourth iteration on, in which no figures are logged, to the seventh."""

    priority = 'HIGHEST'

    def __init__(self, device):
        self.device = device

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.is_pinned = all(leaf.is_pinned() for leaf in pytree.tree_leaves(data_batch))
        if runner.iter == 3:
            self.counting = self.device.counted()
            self.counts = self.counting.__enter__()
        if runner.iter == 6:
            self.counting.__exit__(None, None, None)


MODELS = {
    'Classifier': lambda: Classifier({'type': 'ComposedBackbone'}, 3),
    'SimCLR': lambda: SimCLR(
        {'type': 'ComposedBackbone'},
        {'type': 'ProjectionHead', 'out_dim': 8},
        {'type': 'NTXentLoss'},
    ),
}
RUNS = {
    'plain': ('Classifier', {}, {}),
    'fp16, clipped': ('Classifier', dict(precision='fp16', clip_grad=dict(max_norm=1.0)), {}),
    'slices': ('Classifier', dict(type='AccumulationOptimWrapper', micro_batch_size=2), {}),
    'in backward': ('Classifier', dict(type='OptimizerInBackwardOptimWrapper'), {}),
    'in backward, clipped': (
        'Classifier',
        dict(
            type='OptimizerInBackwardOptimWrapper', clip_grad=dict(type='each_norm', max_norm=1.0)
        ),
        {},
    ),
    'gradient cache': ('SimCLR', dict(type='GradCacheOptimWrapper', chunk_size=4), {}),
    'graphs kept': (
        'SimCLR',
        dict(type='GradCacheOptimWrapper', chunk_size=4, keep_graph='auto'),
        {},
    ),
    'dropit': ('Classifier', {}, dict(dropit=0.5)),
    'bits': ('Classifier', {}, dict(quantized_activations=dict(bits=8, min_numel=1))),
}


def counting(device, work_dir, model, optim, cfg):
    torch.manual_seed(0)
    hook = Counting(device)
    Runner(
        model=MODELS[model](),
        work_dir=str(work_dir),
        train_dataloader=dict(
            dataset=Images(2 if model == 'SimCLR' else None, torch.float32, 8),
            sampler=dict(type='DefaultSampler', shuffle=False),
            batch_size=8,
            num_workers=0,
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper={'optimizer': dict(type='AdamW', lr=0.01), **optim},
        default_hooks=dict(
            checkpoint=None, memory=dict(type='MemoryHook'), logger=dict(type='LoggerHook')
        ),
        custom_hooks=[hook],
        default_scope='memengine',
        log_level='ERROR',
        randomness=dict(seed=0),
        experiment_name=work_dir.name,
        cfg=Config(cfg),
    ).train()
    return hook


@pytest.mark.parametrize('run', RUNS)
def test_an_iteration_waits_once(device, tmp_path, run):
    hook = counting(device, tmp_path, *RUNS[run])
    counts = hook.counts
    by_file = Counter()
    for line, number in counts.waits.items():
        by_file[line.rpartition(':')[0]] += number
    assert by_file == {'memengine/engine/faults/guard.py': 3}
    assert counts.retries == 0
    assert hook.is_pinned  # else CUDA itself waits for the copy of a batch, which nobody counts


@pytest.mark.parametrize('label', [-1, 3])
def test_labels_are_looked_at_before_they_move(label):
    model = MODELS['Classifier']().cuda()
    batch = dict(inputs=torch.randn(2, 1, 8, 8), data_samples=dict(label=torch.tensor([0, label])))
    with pytest.raises(ValueError, match=r'labels must lie in 0\.\.2 .*num_classes=3'):
        model.data_preprocessor(batch, True)
    model.data_preprocessor(batch, False)  # a class that is not learned may be evaluated
