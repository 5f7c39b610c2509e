"""Zero-shot classification and retrieval, against figures that are known beforehand."""

import json
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from torch import nn

from memengine.engine.runner import Runner
from memengine.evaluation.after_training.texts import lines_of, templates_of, tokenizer_of
from memengine.registry import DATASETS, LOOPS, MODELS

WORDS = ['cat', 'dog', 'owl', 'a', 'one']
TOKENIZER = dict(type='WordTokenizer', vocabulary=WORDS, context_length=6)
FIRST = 4  # id of the first word


@MODELS.register_module()
class FlatImage(nn.Flatten):
    """An image's pixels are its features."""

    num_features = 4


@MODELS.register_module()
class CountedWords(nn.Module):
    """How often each of the first four words is in a text."""

    num_features = 4

    def forward(self, tokens):
        return nn.functional.one_hot(tokens, FIRST + 5)[..., FIRST : FIRST + 4].sum(1).float()


@DATASETS.register_module()
class Listed(torch.utils.data.Dataset):
    """Samples as a test lists them."""

    metainfo = dict(classes=('cat', 'dog', 'owl'))

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, row):
        pixels, samples = self.samples[row]
        inputs = torch.tensor(pixels, dtype=torch.float32).view(1, 2, 2)
        tokens = {key: torch.tensor(v) for key, v in samples.items() if key == 'tokens'}
        return dict(inputs=inputs, data_samples={**samples, **tokens})


CAT, DOG, OWL = (torch.eye(4)[row].tolist() for row in range(3))


def run(command, samples, tmp_path, **options):
    model = MODELS.build(
        dict(
            type='CLIP',
            image=dict(type='FlatImage'),
            text=dict(type='CountedWords'),
            embed_dim=4,
            _scope_='memengine',
        )
    )
    for tower in model.towers.values():
        nn.init.eye_(tower.projection.weight)
    loader = dict(
        dataset=dict(type='Listed', samples=samples),
        batch_size=2,
        collate_fn=dict(type='stack_views'),
        sampler=dict(type='DefaultSampler', shuffle=False),
    )
    runner = SimpleNamespace(
        model=model,
        cfg=Config(dict(val_dataloader=loader, default_scope='memengine')),
        seed=0,
        world_size=1,
        work_dir=str(tmp_path),
        build_dataloader=Runner.build_dataloader,
    )
    kind = {'zeroshot': 'ZeroShotLoop', 'retrieve': 'RetrieveLoop'}[command]
    LOOPS.build(dict(type=kind, runner=runner, _scope_='memengine', **options)).run()
    return json.loads((tmp_path / f'{command}.json').read_text())


def labelled(*pairs):
    return [(pixels, dict(label=label, index=i)) for i, (pixels, label) in enumerate(pairs)]


ZEROSHOT = dict(tokenizer=TOKENIZER, templates=['a {}', 'one {}'], topk=[1, 2])


def test_zeroshot_by_names_of_classes(tmp_path, monkeypatch):
    cat_or_owl = [1.0, 0.0, 0.1, 0.0]
    mixed = [0.5, 0.6, 0.0, 0.0]  # a cat that looks more like a dog
    samples = labelled((CAT, 0), (mixed, 0), (DOG, 1), (OWL, 2), (cat_or_owl, 2))
    found = run('zeroshot', samples, tmp_path, **ZEROSHOT)
    assert found['top'] == {'1': 60.0, '2': 100.0}
    assert found['top1_by_class'] == {'cat': 50.0, 'dog': 100.0, 'owl': 50.0}
    other = run('zeroshot', samples, tmp_path, **ZEROSHOT, classes=['owl', 'dog', 'owl cat'])
    assert other['top1_by_class'] == {'owl': 0.0, 'dog': 100.0, 'owl cat': 50.0}
    with pytest.raises(ValueError, match='in another order than they are numbered in: cat, dog, o'):
        run('zeroshot', samples, tmp_path, **ZEROSHOT, classes=['owl', 'dog', 'cat'])
    with pytest.raises(ValueError, match='label 2 has none of the 2 names'):
        run('zeroshot', samples, tmp_path, **ZEROSHOT, classes=['cat', 'dog'])
    with pytest.raises(ValueError, match='zeroshot.topk: 5 is more than the 3 classes'):
        run('zeroshot', samples, tmp_path, **{**ZEROSHOT, 'topk': [5]})
    monkeypatch.delattr(Listed, 'metainfo')
    assert run('zeroshot', samples, tmp_path, **ZEROSHOT, classes=['cat', 'dog', 'owl']) == found


def test_classes_that_a_tokenizer_does_not_tell_apart_are_refused(tmp_path):
    """All images would be of the first of them."""
    samples = labelled((CAT, 0), (DOG, 1), (OWL, 2))
    with pytest.raises(ValueError, match="'lynx' and 'wolf' are the same 6 tokens in 'a {}'"):
        run('zeroshot', samples, tmp_path, **ZEROSHOT, classes=['cat', 'lynx', 'wolf'])
    long = {**ZEROSHOT, 'templates': ['one one one one {}']}
    with pytest.raises(ValueError, match="'cat' and 'dog' are the same .* cuts them off"):
        run('zeroshot', samples, tmp_path, **long)
    run('zeroshot', samples, tmp_path, **ZEROSHOT, classes=['cat', 'dog', 'dog'])


def pairs(*rows):
    """Images with the words of their captions."""
    samples = []
    for index, (pixels, *captions) in enumerate(rows):
        tokens = [[2, FIRST + WORDS.index(word), 3] for word in captions]
        found = tokens if len(tokens) > 1 else tokens[0]
        samples.append((pixels, dict(tokens=found, index=index, image=index // 2)))
    return samples


def test_retrieval_with_several_captions_of_an_image(tmp_path):
    samples = pairs((CAT, 'cat', 'dog'), (DOG, 'dog', 'dog'), (OWL, 'owl', 'cat'))
    found = run('retrieve', samples, tmp_path, topk=[1])
    assert (found['images'], found['texts']) == (3, 6)
    # the cat finds one of two captions 'cat', of which one is the owl's
    assert found['recall']['text_to_image'] == {'1': pytest.approx(100 * 4 / 6)}
    assert found['recall']['image_to_text']['1'] >= 100 / 3 - 1e-6


def test_retrieval_where_rows_share_an_image(tmp_path):
    samples = pairs((CAT, 'cat'), (CAT, 'dog'), (DOG, 'dog'), (DOG, 'owl'))
    found = run('retrieve', samples, tmp_path, topk=[1, 2], match='image')
    assert (found['images'], found['texts']) == (2, 4)
    assert found['recall']['image_to_text']['2'] == 100.0
    rows = run('retrieve', samples, tmp_path, topk=[1, 2])
    assert rows['images'] == 4
    with pytest.raises(ValueError, match="needs 'group' of every sample"):
        run('retrieve', samples, tmp_path, topk=[1], match='group')
    with pytest.raises(ValueError, match='3 is more than the 2 images'):
        run('retrieve', samples, tmp_path, topk=[3], match='image')


def test_samples_without_labels_make_no_figure(tmp_path):
    """All of them were of one class, or of none that a text has."""
    with pytest.raises(ValueError, match='zeroshot: 1 of 2 samples have no label'):
        run('zeroshot', labelled((CAT, 0), (DOG, -1)), tmp_path, **ZEROSHOT)
    samples = [(pixels, {**its, 'label': -1}) for pixels, its in pairs((CAT, 'cat'), (DOG, 'dog'))]
    with pytest.raises(ValueError, match='2 of 2 samples have no label'):
        run('retrieve', samples, tmp_path, topk=[1], match='label')
    assert run('retrieve', samples, tmp_path, topk=[1])['recall']['image_to_text'] == {'1': 100.0}


def test_texts_of_a_setting(tmp_path):
    path = tmp_path / 'names.txt'
    path.write_text('grey cat\n\n dog \n')
    assert lines_of(str(path), 'x') == ['grey cat', 'dog']
    with pytest.raises(ValueError, match='x must be a list of texts or a file'):
        lines_of('cat', 'x')
    with pytest.raises(ValueError, match="{} must stand in every template, got 'a cat'"):
        templates_of(['a {}', 'a cat'], 'x')
    pytest.importorskip('open_clip', reason='open_clip is not installed')
    assert len(templates_of('openai', 'x')) == 80
    assert templates_of('simple', 'x')[0] == 'itap of a {}.'


def test_the_tokenizer_is_that_of_the_data():
    def data(*tokenizers):
        steps = [dict(type='Tokenize', tokenizer=one) for one in tokenizers]
        cfg = dict(default_scope='memengine', val_dataloader=dict(dataset=dict(pipeline=steps)))
        return Config(cfg)

    assert tokenizer_of(data(TOKENIZER), None, 'zeroshot').context_length == 6
    for tokenizers in ((), (TOKENIZER, dict(TOKENIZER, context_length=5))):
        with pytest.raises(ValueError, match=r'zeroshot.tokenizer: the pipeline'):
            tokenizer_of(data(*tokenizers), None, 'zeroshot')


def test_a_model_without_texts_is_refused(tmp_path):
    runner = SimpleNamespace(model=nn.Linear(1, 1), world_size=1, work_dir=str(tmp_path))
    loop = LOOPS.build(dict(type='RetrieveLoop', runner=runner, _scope_='memengine'))
    with pytest.raises(ValueError, match='wants a model of images and texts'):
        loop.run()
