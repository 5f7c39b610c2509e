"""``memengine zeroshot``: classes by their names alone.

Shapes: N images, K classes, T templates, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memengine.evaluation.after_training.predictions import collect, dataset_of, one_process
from memengine.evaluation.after_training.results import table, write_results
from memengine.evaluation.after_training.texts import (
    check_has_texts,
    embed_texts,
    lines_of,
    templates_of,
    tokenizer_of,
)
from memengine.evaluation.checks import check_labelled
from memengine.evaluation.knn import unit_rows
from memengine.registry import LOOPS


@LOOPS.register_module()
class ZeroShotLoop:
    """Classifies images by the texts that are nearest, without having seen an image of a class.

    A class is the mean of its normalised text embeddings, one for each template.

    Args:
        runner: With a model of images and texts, and ``val_dataloader`` with labels; of a
            ``BankAndQueries`` the queries are classified.
        classes: Names in the order of the labels, or a text file with one in each line; by default
            those of the data.
        templates: Sentences with ``{}`` where the name goes, or a text file of such; or open_clip's
            ``'openai'`` (80 for photographs) or ``'simple'`` (7 of them).
        tokenizer: Config of the tokenizer; by default that of the validation pipeline.
        topk: Numbers of classes among which the right one is looked for.

    Raises:
        ImportError: When open_clip is missing.
        ValueError: For a model without texts, a label without name, names in another order than the
            data's, or data without labels.

    Source: Radford et al., Learning Transferable Visual Models (2021).
    """

    def __init__(
        self,
        runner: Any,
        classes: Sequence[str] | str | None = None,
        templates: Sequence[str] | str = ('a photo of a {}.',),
        tokenizer: Mapping[str, Any] | None = None,
        topk: Sequence[int] = (1, 5),
    ) -> None:
        if not topk or min(topk) < 1:
            raise ValueError(f'zeroshot.topk must be numbers of at least 1, got {topk}')
        self.runner, self.classes, self.topk = runner, classes, sorted(topk)
        self.templates = templates_of(templates, 'zeroshot.templates')
        self.tokenizer = tokenizer

    def run(self) -> str:
        """Measure, and write ``zeroshot.json`` and ``zeroshot.md``; returns the table."""
        one_process(self.runner, 'zeroshot')
        check_has_texts(self.runner.model, 'zeroshot')
        found = collect(self.runner)
        if 'label' not in found:
            raise ValueError("memengine zeroshot needs labels; let PackInputs.keys hold 'label'")
        chosen = ~found['bank'].bool() if 'bank' in found else slice(None)
        features, labels = found['feature'][chosen], found['label'][chosen]
        check_labelled(labels, 'memengine zeroshot')
        names = self._names()
        prototypes = self._prototypes(names)
        if int(labels.max()) >= len(names):
            raise ValueError(
                f'zeroshot.classes: label {int(labels.max())} has none of the {len(names)} names'
            )
        ks = [k for k in self.topk if k <= len(names)]
        if not ks:
            raise ValueError(
                f'zeroshot.topk: {min(self.topk)} is more than the {len(names)} classes'
            )
        nearest = (unit_rows(features) @ prototypes.T).topk(max(ks), dim=1).indices  # [N, k]
        right = nearest == labels[:, None]
        tops = {k: 100 * right[:, :k].any(1).double().mean().item() for k in ks}
        by_class = {
            name: 100 * right[labels == label, 0].double().mean().item()
            for label, name in enumerate(names)
            if (labels == label).any()
        }
        results = dict(
            images=len(labels),
            templates=self.templates,
            top={str(k): value for k, value in tops.items()},
            top1_by_class=by_class,
        )
        rows = [(f'top-{k}', value) for k, value in tops.items()]
        worst = sorted(by_class, key=by_class.__getitem__)[:3]
        rows += [(f'top-1 of {name}', by_class[name]) for name in worst]
        head = (
            f'of {len(labels)} images, {len(names)} classes, {len(self.templates)} template(s)',
            'right (%)',
        )
        return write_results(self.runner.work_dir, 'zeroshot', results, table(head, rows))

    def _names(self) -> list[str]:
        dataset = dataset_of(self.runner)
        if self.classes is None:
            return [str(name) for name in dataset.metainfo['classes']]
        names = lines_of(self.classes, 'zeroshot.classes')
        own = [str(name) for name in getattr(dataset, 'metainfo', {}).get('classes', ())]
        if names != own and sorted(names) == sorted(own):
            raise ValueError(
                'zeroshot.classes names the classes of the data in another order than they are '
                f'numbered in: {", ".join(own[:10])}{", ..." if len(own) > 10 else ""}; give them '
                'in this one, or leave them out'
            )
        return names

    def _prototypes(self, names: list[str]) -> Tensor:
        """[K, D], of length 1."""
        tokenizer = tokenizer_of(self.runner.cfg, self.tokenizer, 'zeroshot')
        prompts = [text.replace('{}', name) for name in names for text in self.templates]
        tokens = torch.stack([tokenizer(prompt) for prompt in prompts])  # [K * T, L]
        self._check_told_apart(names, tokens.unflatten(0, (len(names), -1)))
        embedded = embed_texts(self.runner, tokens)
        return unit_rows(embedded.unflatten(0, (len(names), -1)).mean(dim=1))

    def _check_told_apart(self, names: list[str], tokens: Tensor) -> None:
        """Raise ValueError for classes of other names that are the same tokens [K, T, L]."""
        first: dict[bytes, str] = {}
        for name, own in zip(names, tokens, strict=True):
            other = first.setdefault(own.numpy().tobytes(), name)
            if other.casefold() != name.casefold():
                raise ValueError(
                    f'zeroshot: {other!r} and {name!r} are the same {tokens.shape[-1]} tokens in '
                    f'{self.templates[0]!r}: the tokenizer does not know their words, or cuts '
                    'them off (context_length); name them otherwise, or shorten the templates'
                )
