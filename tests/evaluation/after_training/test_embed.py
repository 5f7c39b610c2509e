"""What `memengine embed` writes of models and data of any kind."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from torch import nn

from memengine.engine.runner import Runner
from memengine.registry import DATASETS, LOOPS


def embedded(folder, outputs, classes=('a', 'c'), **options):
    """The first shard of a loop on two samples of the second and first class; and what was said."""

    class Data(torch.utils.data.Dataset):
        metainfo = dict(classes=classes)

        def __len__(self):
            return 2

        def __getitem__(self, row):
            return dict(inputs=torch.zeros(1), data_samples=dict(label=1 - row, index=row))

    class Model(nn.Module):
        def test_step(self, batch):
            return [{name: value[row] for name, value in outputs.items()} for row in range(2)]

    DATASETS.register_module(name='TwoSamples', module=Data, force=True)
    said, loader = [], dict(batch_size=2, dataset=dict(type='TwoSamples'), num_workers=0)
    folder.mkdir()
    runner = SimpleNamespace(
        model=Model(),
        rank=0,
        world_size=1,
        seed=0,
        work_dir=str(folder),
        build_dataloader=Runner.build_dataloader,
        logger=SimpleNamespace(warning=said.append),
        message_hub=SimpleNamespace(runtime_info=dict(dataset_meta=dict(classes=['a', 'b', 'c']))),
        cfg=Config(dict(load_from='1.pth', val_dataloader=loader)),
    )
    runner.cfg.val_dataloader.collate_fn = dict(type='default_collate')
    LOOPS.build(dict(type='EmbedLoop', _scope_='memengine', runner=runner, **options)).run()
    return np.load(folder / 'features_00000.npz'), said


def test_embedded_labels_are_places_in_logits(tmp_path):
    """Labels were the validation data's, where training had a class between."""
    feature, logits = torch.ones(2, 4), torch.eye(3)[[2, 0]]
    shard, said = embedded(tmp_path / 'fewer', dict(feature=feature, logits=logits))
    assert shard['label'].tolist() == shard['logits'].argmax(1).tolist() == [2, 0] and not said
    given = dict(feature=feature, logits=logits)
    shard, said = embedded(tmp_path / 'others', given, classes=('a', 'd'))
    assert shard['label'].tolist() == [1, 0]
    assert "training has no class 'd'" in said[0] and len(said) == 1
    shard, said = embedded(tmp_path / 'features', dict(feature=feature), classes=('a', 'd'))
    assert shard['label'].tolist() == [1, 0] and not said


@pytest.mark.parametrize('name', ['logits', 'text'])
def test_embed_holds_all_outputs_as_they_are(tmp_path, name):
    """Of float16 only features were looked at, and numbers of classes were rounded to it."""
    outputs = dict(feature=torch.ones(2, 4), number=torch.tensor([2049, 4097]))
    shard, _ = embedded(tmp_path / 'whole', outputs, dtype='float16')
    assert shard['number'].tolist() == [2049, 4097] and shard['feature'].dtype == np.float16
    outputs[name] = torch.tensor([[1.0, 1e6], [0.0, -float('inf')]])
    with pytest.raises(ValueError, match=f"embed.dtype='float16' cannot hold the {name} of some"):
        embedded(tmp_path / 'large', outputs, dtype='float16')
    shard, _ = embedded(tmp_path / 'masked', outputs)
    assert shard[name][1, 1] == -np.inf, 'a class that a model rules out'
    outputs[name][0, 0] = float('nan')
    with pytest.raises(ValueError, match=f'the {name} of some images are NaN'):
        embedded(tmp_path / 'nan', outputs)


def test_the_list_of_settings_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """Another rank read what had been written of it, and ended in JSON's error."""
    seen, replace = [], Path.replace
    monkeypatch.setattr(
        Path,
        'replace',
        lambda path, to: (seen.append((to.name, to.exists())), replace(path, to))[1],
    )
    embedded(tmp_path / 'run', dict(feature=torch.ones(2, 4)))
    assert seen == [('embed.json', False), ('features_00000.npz', False)]
