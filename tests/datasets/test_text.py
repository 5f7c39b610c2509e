"""Blocks of a text."""

import sys

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from memengine.datasets import TextBlocks, stack_views


@pytest.fixture
def file(tmp_path):
    (tmp_path / 'text.txt').write_text('Größe, abcdefghij', encoding='utf-8')  # 19 bytes
    return str(tmp_path / 'text.txt')


def test_bytes_in_blocks_one_behind_the_other(file):
    dataset = TextBlocks(file, block_size=6)
    assert len(dataset) == 3
    items = list(dataset)
    text = b''.join(bytes(item['inputs'].tolist()) for item in items)
    assert text == 'Größe, abcdefghij'.encode()[:18]
    assert items[0]['inputs'].dtype == torch.long
    batch = stack_views(items)
    assert batch['inputs'].shape == (3, 6)
    assert batch['data_samples']['index'].tolist() == [0, 1, 2]
    last = TextBlocks(file, block_size=6, indices=-1)
    assert len(last) == 1 and torch.equal(last[0]['inputs'], items[2]['inputs'])
    assert last.sample_name(0) == f'block 2 of {file!r}'


def test_a_tokenizer_by_its_folder(file, tmp_path):
    vocabulary = {letter: number for number, letter in enumerate('Größe, abcdefghij'[::-1])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(tmp_path / 'tokens')
    dataset = TextBlocks(file, block_size=17, tokenizer=str(tmp_path / 'tokens'))
    expected = [vocabulary[letter] for letter in 'Größe, abcdefghij']
    assert dataset[0]['inputs'].tolist() == expected


def test_what_does_not_fit_is_refused(file, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match='there is no file'):
        TextBlocks(str(tmp_path / 'none.txt'))
    with pytest.raises(ValueError, match='19 tokens, which do not fill a block of 20'):
        TextBlocks(file, block_size=20)
    with pytest.raises(ValueError, match='block_size must be at least 2'):
        TextBlocks(file, block_size=1)
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ImportError, match='pip install transformers'):
        TextBlocks(file, tokenizer='gpt2')


def test_a_tokenizer_that_is_not_there_is_named(file, tmp_path):
    with pytest.raises(ValueError, match="tokenizer='.*nowhere'"):
        TextBlocks(file, tokenizer=str(tmp_path / 'nowhere'))
