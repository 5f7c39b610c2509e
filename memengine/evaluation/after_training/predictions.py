"""What a model says of the images of the run's validation data.

Shapes: N samples, D width of the features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from memengine.registry import DATASETS


def one_process(runner: Any, command: str) -> None:
    """Raise ValueError on several ranks, which would all do the same."""
    if runner.world_size > 1:
        raise ValueError(
            f'memengine {command} runs in one process; start it without torchrun and --launcher'
        )


def dataset_of(runner: Any) -> Any:
    """The data set of ``val_dataloader``, or else of ``test_dataloader``."""
    return DATASETS.build(loader_config(runner)['dataset'])


def loader_config(runner: Any) -> dict[str, Any]:
    """The config of ``val_dataloader``, or else of ``test_dataloader``."""
    for name in ('val_dataloader', 'test_dataloader'):
        if runner.cfg.get(name) is not None:
            return dict(runner.cfg[name])
    raise ValueError(
        'the config has no val_dataloader, whose data would be taken: add one, with a pipeline '
        'without augmentation'
    )


def batches(
    runner: Any, dataset: Any, rows: Sequence[int] | None = None, **changed: Any
) -> DataLoader:
    """The loader of samples in order; settings of ``val_dataloader`` may be changed."""
    config = {**loader_config(runner), **changed}
    config['dataset'] = dataset if rows is None else Subset(dataset, rows)
    config['sampler'] = torch.utils.data.SequentialSampler(config['dataset'])
    config.update(drop_last=False, persistent_workers=False)
    return runner.build_dataloader(config, seed=runner.seed)


def predictions(
    runner: Any, dataset: Any, rows: Sequence[int] | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Batches in order, and what the model's ``predict`` gives of them.

    Yields:
        The batch as the loader gave it; the model's outputs by name, a row for each sample, on
        the CPU.
    """
    runner.model.eval()
    with torch.inference_mode():
        for batch in batches(runner, dataset, rows):
            outputs = runner.model.test_step(batch)
            names = [name for name, value in outputs[0].items() if isinstance(value, Tensor)]
            yield batch, {n: torch.stack([one[n] for one in outputs]).cpu() for n in names}


def collect(runner: Any) -> dict[str, Tensor]:
    """Features and labels of all validation data.

    Returns:
        ``feature`` [N, D] in fp32, what else the model gives by name, and ``label`` Long[N],
        ``index`` Long[N] and ``bank`` Bool[N] where the data have them.

    Raises:
        ValueError: When a feature is NaN or infinite.
    """
    parts: dict[str, list[Tensor]] = {}
    for batch, outputs in predictions(runner, dataset_of(runner)):
        samples = batch['data_samples']
        known = {name: samples[name] for name in ('label', 'index', 'bank') if name in samples}
        for name, values in {**outputs, **known}.items():
            parts.setdefault(name, []).append(torch.as_tensor(values))
    found = {name: torch.cat(values) for name, values in parts.items()}
    found['feature'] = found['feature'].float().flatten(1)
    if not found['feature'].isfinite().all():
        raise ValueError('the features of some images are NaN or infinite')
    return found
