"""``memengine retrieve``: images found by texts, and texts by images.

Shapes: B images of a batch, C captions of each, L tokens, N images and M texts in all, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memengine.evaluation.after_training.predictions import batches, dataset_of, one_process
from memengine.evaluation.after_training.results import table, write_results
from memengine.evaluation.after_training.texts import check_has_texts, embed_texts
from memengine.evaluation.image_text import recall_at
from memengine.evaluation.knn import refuse_unlabelled
from memengine.registry import LOOPS

_WAYS = {'image_to_text': 'image to text', 'text_to_image': 'text to image'}


@LOOPS.register_module()
class RetrieveLoop:
    """Recall at k both ways, with one or several captions of an image.

    An image may have several captions at once (``tokens`` [B, C, L]), or be in the data once with
    each of them, where ``match`` names what its rows share: it then counts once. An image finds
    its texts if one of them is among the k nearest.

    Args:
        runner: With a model of images and texts, and ``val_dataloader`` with ``tokens``.
        topk: Numbers of candidates that are looked at.
        match: Entry of ``data_samples``, of whole numbers, that says which texts are right:
            ``'index'``, those of the same row; the number of an image that is there several times;
            ``'label'``, any text of its class, for captions made from labels.

    Raises:
        ValueError: For a model or data without texts, without that entry, or too few of them.

    Cost: 4 * D bytes for each image and text, 4 * M or N bytes for each of 1,024 queries.
    """

    def __init__(self, runner: Any, topk: Sequence[int] = (1, 5, 10), match: str = 'index') -> None:
        if not topk or min(topk) < 1:
            raise ValueError(f'retrieve.topk must be numbers of at least 1, got {topk}')
        self.runner, self.topk, self.match = runner, sorted(topk), match

    def run(self) -> str:
        """Measure, and write ``retrieve.json`` and ``retrieve.md``; returns the table."""
        one_process(self.runner, 'retrieve')
        check_has_texts(self.runner.model, 'retrieve')
        images, image_keys, texts, text_keys = self._collect()
        if self.match == 'label':
            refuse_unlabelled(image_keys, "retrieve.match='label'")
        else:
            images, image_keys = _once(images, image_keys)
        if (most := max(self.topk)) > min(len(images), len(texts)):
            raise ValueError(
                f'retrieve.topk: {most} is more than the {len(images)} images or {len(texts)} texts'
            )
        found = {
            'image_to_text': (images, texts, image_keys, text_keys),
            'text_to_image': (texts, images, text_keys, image_keys),
        }
        recall = {
            way: {str(k): recall_at(queries, candidates, wanted, k, theirs) for k in self.topk}
            for way, (queries, candidates, wanted, theirs) in found.items()
        }
        results = dict(images=len(images), texts=len(texts), match=self.match, recall=recall)
        head = (f'of {len(images)} images and {len(texts)} texts', *(f'R@{k}' for k in self.topk))
        rows = [(label, *recall[way].values()) for way, label in _WAYS.items()]
        return write_results(self.runner.work_dir, 'retrieve', results, table(head, rows))

    def _collect(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings and keys of all images [N, D], [N] and texts [M, D], [M]."""
        runner, parts = self.runner, []
        runner.model.eval()
        for batch in batches(runner, dataset_of(runner)):
            data = runner.model.data_preprocessor(batch, False)
            samples = data['data_samples']
            for name in ('tokens', self.match):
                if name not in samples:
                    raise ValueError(
                        f'memengine retrieve needs {name!r} of every sample; let the pipeline of '
                        'val_dataloader make it, and PackInputs.keys hold it'
                    )
            with torch.inference_mode():
                images = runner.model.features(data['inputs']).float().cpu()
            tokens = samples['tokens']  # [B, L] or [B, C, L]
            keys = torch.as_tensor(samples[self.match]).cpu()
            captions = tokens.flatten(0, -2)
            repeated = keys.repeat_interleave(len(captions) // len(keys))
            parts.append((images, keys, embed_texts(runner, captions), repeated))
        images, keys, texts, of_texts = (torch.cat(part) for part in zip(*parts, strict=True))
        return images, keys, texts, of_texts


def _once(images: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each key."""
    seen: dict[int, int] = {}
    for row, key in enumerate(keys.tolist()):
        seen.setdefault(key, row)
    rows = torch.tensor(list(seen.values()))
    return images[rows], keys[rows]
