"""The commands that are run after training, on the folder of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from memengine.engine.cli.main import main
from memengine.evaluation import weighted_knn
from memengine.evaluation.linear_probe import few_shot, linear_probe

ROOT = Path(__file__).parents[3]
FEW = [
    '--cfg-options',
    'val_dataloader.dataset.bank.indices=60',
    'val_dataloader.dataset.queries.indices=20',
    'val_dataloader.num_workers=0',
    'val_dataloader.persistent_workers=False',
    'val_dataloader.batch_size=32',
]


def blobs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    noise = torch.randn(count, 4, generator=generator)
    return torch.eye(3, 4)[labels] * 20 + noise, labels


def test_probes_learn_what_is_separable_and_the_queries_choose_nothing():
    features, queries = blobs(90, 0), blobs(30, 1)
    probe = linear_probe(*features, *queries, learning_rates=[0.0, 0.1], epochs=20)
    assert probe.queries.shape == (20, 2) and probe.best == 1
    assert probe.queries[-1, 1] == 100 > probe.queries[-1, 0], 'a rate of zero learns nothing'
    wrong = (queries[0], (queries[1] + 1) % 3)
    assert linear_probe(*features, *wrong, learning_rates=[0.0, 0.1], epochs=20).best == 1
    assert few_shot(*features, *queries, shots=5).eq(100).all()
    with pytest.raises(ValueError, match='shots=31, but a class has 30'):
        few_shot(*features, *queries, shots=31)


def test_a_feature_that_never_varies_says_nothing():
    """Noise of its rounded mean, divided by a tiny deviation, was larger than all others."""
    (features, labels), (queries, query_labels) = blobs(90, 0), blobs(30, 1)
    features[:, 3] = queries[:, 3] = 1234.567
    for dtype in (torch.float32, torch.float16):
        given = (features.to(dtype), labels, queries.to(dtype), query_labels)
        probe = linear_probe(*given, learning_rates=[0.1], epochs=20)
        assert probe.queries[-1].eq(100).all()
    far = (1e9 + features.double(), labels, 1e9 + queries.double(), query_labels)
    assert linear_probe(*far, learning_rates=[0.1], epochs=20).queries[-1].eq(100).all()


def test_settings_that_measure_nothing_are_refused():
    """Means of no sample are NaN, of which the first class was the nearest."""
    sets = (*blobs(90, 0), *blobs(30, 1))
    with pytest.raises(ValueError, match='few-shot: shots=0 and draws=5 must be at least 1'):
        few_shot(*sets, shots=0)
    with pytest.raises(ValueError, match='linear probe: epochs=0 and'):
        linear_probe(*sets, learning_rates=[0.1], epochs=0)
    with pytest.raises(ValueError, match=r'learning_rates=\[\] train nothing'):
        linear_probe(*sets, learning_rates=[])


def test_features_that_are_no_numbers_make_no_figure():
    (features, labels), queries = blobs(90, 0), blobs(30, 1)
    features[3, 0] = float('nan')
    with pytest.raises(ValueError, match='linear probe: the features of 1 of 90 samples'):
        linear_probe(features, labels, *queries, learning_rates=[0.1])
    with pytest.raises(ValueError, match='weighted_knn: the features of 1 of 90 samples'):
        weighted_knn(queries[0], features, labels)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The folder of a run: the quick start's model as it starts."""
    from memengine.engine.config.file import load_config
    from memengine.registry import MODELS

    folder = tmp_path_factory.mktemp('run')
    cfg = load_config(ROOT / 'configs/dino_vit.py')
    cfg.dump(folder / 'dino_vit.py')
    torch.manual_seed(0)
    model = MODELS.build(dict(cfg.model, _scope_='memengine'))
    torch.save({'meta': {}, 'state_dict': model.state_dict()}, folder / 'epoch_1.pth')
    return folder


def test_probe(trained, capsys):
    run = str(trained / 'epoch_1.pth')
    options = ['experiment_name=probe', 'probe.shots=[1,99]', 'probe.epochs=5', 'probe.k=[1,20,99]']
    assert main(['probe', run, *FEW, *options]) == 0, capsys.readouterr().err
    assert '| 20-NN |' in capsys.readouterr().out
    folder = trained / 'report' / 'probe'
    found = json.loads((folder / 'probe.json').read_text())
    assert found['samples'] == dict(bank=60, queries=20)
    assert len(found['linear']) == 9 and set(found['knn_top1']) == {'1', '20'}
    assert set(found['few_shot_top1']) == {'1'}, 'more than a class has is left out, as with k'
    assert found['linear_top1'] == found['linear'][str(found['learning_rate'])]['top1']
    assert (folder / 'probe.png').stat().st_size > 0


def test_embed_goes_on_where_it_was_broken_off(trained, capsys):
    run, options = str(trained / 'epoch_1.pth'), ['embed.shard_size=30']
    assert main(['embed', run, *FEW, *options, 'experiment_name=embed1']) == 0
    folder = trained / 'report' / 'embed'
    files = sorted(folder.glob('features_*.npz'))
    shards = [dict(np.load(file)) for file in files]
    assert [len(shard['feature']) for shard in shards] == [30, 30, 20]
    index = np.concatenate([shard['index'] for shard in shards])
    assert index.tolist() == list(range(80)), 'of the bank, then of the queries'
    kept = files[0].stat().st_mtime_ns
    files[1].unlink()
    assert main(['embed', run, *FEW, *options, 'experiment_name=embed2']) == 0
    assert '30 of 80 images in 1 file(s) of 3' in capsys.readouterr().out
    assert files[0].stat().st_mtime_ns == kept
    np.testing.assert_allclose(np.load(files[1])['feature'], shards[1]['feature'], atol=1e-5)
    other = ['embed.shard_size=40', 'experiment_name=embed3']
    assert main(['embed', run, *FEW, *other]) == 1
    assert 'holds features of other shard_size' in capsys.readouterr().err


def test_embed_keeps_no_features_of_other_weights_or_data(trained, tmp_path, capsys):
    """As after a second training in the same folder, whose checkpoint has the same name."""
    (tmp_path / 'dino_vit.py').write_text((trained / 'dino_vit.py').read_text())
    checkpoint = torch.load(trained / 'epoch_1.pth', weights_only=True)
    torch.save(checkpoint, tmp_path / 'epoch_1.pth')
    run = str(tmp_path / 'epoch_1.pth')
    assert main(['embed', run, *FEW, 'experiment_name=embed4']) == 0
    others = [
        option.replace('queries.indices=20', 'queries.indices=[0,1,2,3,4,5,6,7,8,9,11,12,13,14,15]')
        for option in FEW
    ]
    others[1] = 'val_dataloader.dataset.bank.indices=65'  # as many images in all
    assert main(['embed', run, *others, 'experiment_name=embed5']) == 1
    assert 'holds features of other data: remove them' in capsys.readouterr().err
    checkpoint['state_dict']['teacher.backbone.model.fc_norm.bias'] += 1
    torch.save(checkpoint, run)
    assert main(['embed', run, *FEW, 'experiment_name=embed6']) == 1
    assert 'holds features of other weights: remove them' in capsys.readouterr().err


def test_embed_writes_no_features_that_are_not_finite(trained, tmp_path, capsys):
    (tmp_path / 'dino_vit.py').write_text((trained / 'dino_vit.py').read_text())
    checkpoint = torch.load(trained / 'epoch_1.pth', weights_only=True)
    for value, option, said in (
        (1e6, 'embed.dtype=float16', "embed.dtype='float16' cannot hold the features"),
        (float('inf'), 'embed.dtype=float32', 'features of some images are NaN or infinite'),
    ):
        checkpoint['state_dict']['teacher.backbone.model.fc_norm.bias'][:] = value
        torch.save(checkpoint, run := tmp_path / 'epoch_1.pth')
        options = [*FEW, option, f'experiment_name={option}']
        assert main(['embed', str(run), *options, '--work-dir', str(tmp_path / option)]) == 1
        assert said in capsys.readouterr().err


def test_what_is_not_there_is_said(trained, capsys):
    assert main(['probe', str(trained / 'none')]) == 1
    assert 'RUN: there is no' in capsys.readouterr().err
    assert main(['probe', str(trained / 'epoch_1.pth'), '--cfg-options', 'probe.shot=[1]']) == 1
    assert "did you mean 'shots'" in capsys.readouterr().err


def test_every_command_has_a_loop():
    from memengine.engine.cli.parser import AFTER_TRAINING
    from memengine.engine.config.schema.runner import AFTER_TRAINING as LOOP_OF
    from memengine.registry import LOOPS

    assert list(AFTER_TRAINING) == list(LOOP_OF)
    assert all(LOOPS.get(name) is not None for name in LOOP_OF.values())
