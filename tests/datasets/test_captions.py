"""Captions made from labels, and their tokens."""

import sys
from pathlib import Path

import open_clip
import pytest
import torch
from mmengine.config import Config

from memengine.datasets import (
    ImageDataset,
    LabelCaption,
    OpenClipTokenizer,
    Tokenize,
    TransformersTokenizer,
    WordTokenizer,
    stack_views,
)

WORDS = ['a', 'photo', 'of', 'zero', 'one', ',']


def test_words_become_ids():
    tokenizer = WordTokenizer(WORDS, context_length=8)
    assert tokenizer.vocab_size == 10
    assert tokenizer('A photo of one').tolist() == [2, 4, 5, 6, 8, 3, 0, 0]
    assert tokenizer('zero,one').tolist() == [2, 7, 9, 8, 3, 0, 0, 0]
    assert tokenizer('a cat').tolist() == [2, 4, 1, 3, 0, 0, 0, 0]
    assert tokenizer('').tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    long = tokenizer('a ' * 20)
    assert long.tolist() == [2, 4, 4, 4, 4, 4, 4, 3] and long.dtype == torch.long


def test_words_are_of_any_script():
    tokenizer = WordTokenizer(['café', 'Ἑλλάς', 'кошка', 'हिन्दी', '猫', 'naïve'], context_length=8)
    assert tokenizer('Cafe\u0301 КОШКА').tolist() == [2, 4, 6, 3, 0, 0, 0, 0]  # an accent apart
    assert tokenizer('हिन्दी, naïve').tolist() == [2, 7, 1, 9, 3, 0, 0, 0]
    assert tokenizer('黒猫 ἑλλάς').tolist() == [2, 1, 8, 5, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        (dict(vocabulary=[]), 'list of words'),
        (dict(vocabulary='words'), 'list of words'),
        (dict(vocabulary=['two words']), "'two words' .* no single word"),
        (dict(vocabulary=['a', 'A']), "'A' is in the vocabulary twice"),
        (dict(vocabulary=['a'], context_length=2), 'context_length'),
    ],
)
def test_bad_vocabularies_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        WordTokenizer(**settings)


def test_captions_in_turn_and_at_random():
    names, templates = ['zero', 'one'], ['a {}', 'the {}', 'one more {}']
    in_turn = LabelCaption(names, templates, choice='index')
    made = [in_turn(dict(label=i % 2, index=i))['caption'] for i in range(4)]
    assert made == ['a zero', 'the one', 'one more zero', 'a one']
    torch.manual_seed(0)
    random = LabelCaption(names, templates)
    drawn = [random(dict(label=1, index=0))['caption'] for _ in range(60)]
    assert set(drawn) == {'a one', 'the one', 'one more one'}
    torch.manual_seed(0)
    assert drawn == [random(dict(label=1, index=0))['caption'] for _ in range(60)]


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        (dict(names=[], templates=['{}']), 'names'),
        (dict(names='zero', templates=['{}']), 'names'),
        (dict(names=['zero'], templates='a {}'), 'templates'),
        (dict(names=['zero'], templates=['a zero']), "must stand once .* got 'a zero'"),
        (dict(names=['zero'], templates=['{}'], choice='first'), 'choice'),
    ],
)
def test_bad_captions_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        LabelCaption(**settings)


def test_what_a_sample_lacks_is_named():
    with pytest.raises(ValueError, match='label 1 has none of the 1 names'):
        LabelCaption(['zero'], ['{}'])(dict(label=1, index=0))
    with pytest.raises(ValueError, match='put ChooseCaption or LabelCaption'):
        Tokenize(dict(type='WordTokenizer', vocabulary=WORDS))(dict(label=1))
    with pytest.raises(ValueError, match="did you mean 'WordTokenizer'"):
        Tokenize(dict(type='WordTokeniser', vocabulary=WORDS))


def test_a_batch_of_images_and_tokens():
    dataset = ImageDataset(
        source=dict(type='Digits'),
        pipeline=[
            dict(type='torchvision/PILToTensor'),
            dict(type='torchvision/ToDtype', dtype='float32', scale=True),
            dict(type='LabelCaption', names=[str(d) for d in range(10)], templates=['a {}']),
            dict(
                type='Tokenize',
                tokenizer=dict(
                    type='WordTokenizer',
                    vocabulary=['a', *(str(d) for d in range(10))],
                    context_length=5,
                ),
            ),
            dict(type='PackInputs', keys=['label', 'index', 'tokens']),
        ],
    )
    batch = stack_views([dataset[i] for i in range(6)])
    assert batch['inputs'].shape == (6, 1, 8, 8)
    expected = [[2, 4, 5 + label, 3, 0] for label in batch['data_samples']['label'].tolist()]
    assert batch['data_samples']['tokens'].tolist() == expected


@pytest.mark.parametrize(
    ('kind', 'module'),
    [(OpenClipTokenizer, 'open_clip'), (TransformersTokenizer, 'transformers')],
)
def test_a_missing_library_is_named(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f'{kind.__name__} needs {module}: pip install'):
        kind('any')


def test_open_clips_tokenizer():
    tokens = OpenClipTokenizer('ViT-B-32')('a photo of one')
    assert torch.equal(tokens, open_clip.get_tokenizer('ViT-B-32')(['a photo of one'])[0])
    assert tokens.shape == (77,)


def test_the_quick_starts_tokenizer_knows_every_word_and_the_text_tower_every_token():
    root = Path(__file__).parents[2]
    cfg = Config.fromfile(root / 'configs' / 'clip_vit.py')
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        caption, tokenize = (
            next(step for step in loader.dataset.pipeline if step['type'] == name)
            for name in ('LabelCaption', 'Tokenize')
        )
        tokenizer = WordTokenizer(tokenize.tokenizer.vocabulary, tokenize.tokenizer.context_length)
        assert tokenizer.vocab_size == cfg.model.text.vocab_size
        assert tokenizer.context_length == cfg.model.text.context_length
        for template in caption.templates:
            for name in caption['names']:
                tokens = tokenizer(template.format(name)).tolist()
                assert 1 not in tokens  # no unknown word
                assert len(template.split()) + 2 == sum(token > 0 for token in tokens)
