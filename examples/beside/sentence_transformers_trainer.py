"""sentence-transformers: its trainer with checkpointed, recomputed blocks; two lines change.

python examples/beside/sentence_transformers_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

from memengine import SavedBytes, apply_techniques  # 1: this line is new

WORDS = [f'word{number}' for number in range(13)]


def tiny_bert(folder: Path) -> SentenceTransformer:
    """A model with random weights, for want of a network to load one from."""
    vocabulary = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *WORDS]
    (folder / 'vocab.txt').write_text('\n'.join(vocabulary))
    BertTokenizerFast(str(folder / 'vocab.txt')).save_pretrained(folder)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32)], device='cpu')


def train(folder: Path, **techniques: object) -> tuple[dict[str, torch.Tensor], int]:
    """Train for four steps: the weights, and the most bytes saved."""
    torch.manual_seed(0)
    model = tiny_bert(folder)
    pairs = {
        'anchor': [f'{word} word0' for word in WORDS],
        'positive': [f'word1 {word}' for word in WORDS],
    }
    if techniques:
        apply_techniques(model, **techniques)  # 2: before the trainer gets it
    off = dict(report_to='none', save_strategy='no', logging_strategy='no', disable_tqdm=True)
    arguments = SentenceTransformerTrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=8, use_cpu=True, **off
    )
    loss = MultipleNegativesRankingLoss(model)
    with SavedBytes(model) as saved:
        SentenceTransformerTrainer(model, arguments, Dataset.from_dict(pairs), loss=loss).train()
    return model.state_dict(), saved.peak_bytes


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as place:
        plain, most = train(Path(place))
        weights, less = train(Path(place), recomputed_activations=True)
    print('same weights:', all(torch.equal(plain[name], weights[name]) for name in plain))
    print(f'saved: {most / 2**20:.3f} MiB, recomputed {less / 2**20:.3f} MiB')
