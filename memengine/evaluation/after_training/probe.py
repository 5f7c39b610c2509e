"""``memengine probe``: how much a linear layer, neighbours and a few samples make of features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memengine.evaluation.after_training.predictions import collect, one_process
from memengine.evaluation.after_training.results import table, write_results
from memengine.evaluation.knn import weighted_knn
from memengine.evaluation.linear_probe import LinearProbe, few_shot, linear_probe
from memengine.registry import LOOPS

_RATES = tuple(round(10 ** (power / 2), 4) for power in range(-6, 3))  # 0.001 to 10


@LOOPS.register_module()
class ProbeLoop:
    """Measures frozen features: linear probe, k-NN and few-shot, on one pass over the images.

    The features are computed once, without augmentation. The bank of the validation data is
    learned from, its queries are classified. The learning rate is chosen by a share of the bank
    that is held out, so that the queries have no say in it.

    Args:
        runner: With the model, and ``val_dataloader`` of a ``BankAndQueries`` in its config.
        learning_rates: Of the linear probes, which are trained side by side.
        epochs: Passes over the bank's features.
        batch_size: Features in a step.
        weight_decay: Of the linear layers.
        held_out: Share of the bank that chooses the learning rate.
        k: Numbers of neighbours; those beyond the bank's size are left out, and said.
        temperature: Of the neighbours' votes.
        shots: Samples of each class, for few-shot; those beyond the smallest class are left out,
            and said.
        draws: How often they are drawn.

    Raises:
        ValueError: When the data have no bank, or too few samples.
    """

    def __init__(
        self,
        runner: Any,
        learning_rates: Sequence[float] = _RATES,
        epochs: int = 100,
        batch_size: int = 1024,
        weight_decay: float = 0.0,
        held_out: float = 0.2,
        k: Sequence[int] = (1, 5, 20),
        temperature: float = 0.07,
        shots: Sequence[int] = (1, 5),
        draws: int = 5,
    ) -> None:
        self.runner = runner
        self.learning_rates, self.k, self.shots = list(learning_rates), list(k), list(shots)
        self.temperature, self.draws = temperature, draws
        self.linear: dict[str, Any] = dict(
            epochs=epochs, batch_size=batch_size, weight_decay=weight_decay, held_out=held_out
        )

    def run(self) -> str:
        """Measure, and write ``probe.json``, ``probe.md`` and ``probe.png``; returns the table."""
        one_process(self.runner, 'probe')
        found = collect(self.runner)
        if 'bank' not in found or 'label' not in found:
            raise ValueError(
                'memengine probe needs labelled images to learn from and others to classify: '
                "val_dataloader.dataset=dict(type='BankAndQueries', bank=..., queries=...)"
            )
        bank = found['bank'].bool()
        features, queries = found['feature'][bank], found['feature'][~bank]
        labels, query_labels = found['label'][bank], found['label'][~bank]
        sets = (features, labels, queries, query_labels)
        probe = linear_probe(*sets, learning_rates=self.learning_rates, **self.linear)
        knn = {}
        for k in self.k:
            if k > len(features):
                self.runner.logger.warning(f'probe.k={k} is more than the {len(features)} images')
                continue
            guessed = weighted_knn(queries, features, labels, k, self.temperature)
            knn[k] = 100 * (guessed == query_labels).double().mean().item()
        few = {}
        least = int(labels.unique(return_counts=True)[1].min())
        for n in self.shots:
            if n > least:
                self.runner.logger.warning(f'probe.shots={n} is more than the {least} of a class')
                continue
            few[n] = few_shot(*sets, shots=n, draws=self.draws)
        self._draw(probe)
        linear = {
            str(rate): dict(held_out=probe.held_out[-1, i].item(), top1=probe.queries[-1, i].item())
            for i, rate in enumerate(self.learning_rates)
        }
        best = self.learning_rates[probe.best]
        results = dict(
            samples=dict(bank=len(features), queries=len(queries)),
            linear_top1=probe.queries[-1, probe.best].item(),
            learning_rate=best,
            linear=linear,
            knn_top1={str(k): value for k, value in knn.items()},
            few_shot_top1={
                str(n): dict(mean=v.mean().item(), std=v.std(unbiased=False).item())
                for n, v in few.items()
            },
        )
        rows: list[tuple[str, Any]] = [(f'linear, learning rate {best}', results['linear_top1'])]
        rows += [(f'{k}-NN', value) for k, value in knn.items()]
        rows += [
            (f'{n} image(s) a class', f'{v.mean():.1f} ± {v.std(unbiased=False):.1f}')
            for n, v in few.items()
        ]
        head = (f'of {len(queries)} images, with {len(features)} to learn from', 'top-1 (%)')
        return write_results(self.runner.work_dir, 'probe', results, table(head, rows))

    def _draw(self, probe: LinearProbe) -> None:
        from memengine.visualization.figures import figure_of, save_figure

        figure, ((over_epochs, over_rates),) = figure_of(1, 2, width=8.4, height=2.8)
        epochs = torch.arange(1, len(probe.queries) + 1)
        for name, curve in (('held out', probe.held_out), ('queries', probe.queries)):
            over_epochs.plot(epochs, curve[:, probe.best], label=name)
            over_rates.plot(self.learning_rates, curve[-1], marker='o', label=name)
        over_epochs.set(xlabel='epoch', ylabel='top-1 (%)')
        over_rates.set(xlabel='learning rate', xscale='log')
        over_rates.legend(frameon=False)
        save_figure(figure, Path(self.runner.work_dir) / 'probe.png')
