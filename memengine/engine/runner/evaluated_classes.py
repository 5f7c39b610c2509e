"""Evaluation by classes: data that number them otherwise than training did follow its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.runner import BaseLoop


def follow_training_classes(runner: Any, checkpoint_meta: Mapping[str, Any]) -> None:
    """Have the labels of validation and test data follow the classes that are trained.

    It is done where a metric compares a model's classes with labels (``needs_trained_classes``),
    and both data know their classes by name.

    Args:
        runner: The run, its loops built.
        checkpoint_meta: That of the checkpoint that was loaded, which names the classes where
            nothing is trained.

    Raises:
        ValueError: When the evaluated data have a class that training lacks, or number COCO's
            categories otherwise.
    """
    is_trained = isinstance(runner._train_loop, BaseLoop)
    metainfo = (
        getattr(runner._train_loop.dataloader.dataset, 'metainfo', None)
        if is_trained
        else checkpoint_meta.get('dataset_meta')
    )
    trained = _classes(metainfo)
    for name, loop in (('val', runner._val_loop), ('test', runner._test_loop)):
        if isinstance(loop, BaseLoop):
            evaluated = getattr(loop.dataloader.dataset, 'metainfo', None)
            _check_ids(f'{name}_dataloader.dataset', _ids(evaluated), _ids(metainfo), is_trained)
    for name, loop in (('val', runner._val_loop), ('test', runner._test_loop)):
        if not isinstance(loop, BaseLoop) or not trained:
            continue
        dataset = loop.dataloader.dataset
        follow = getattr(dataset, 'follow_classes', None)
        own = _classes(getattr(dataset, 'metainfo', None))
        metrics = getattr(loop.evaluator, 'metrics', ())
        needed = any(getattr(metric, 'needs_trained_classes', False) for metric in metrics)
        if follow is None or not needed or not own or own == trained:
            continue
        # Numbers stand for names that are not known; those of a checkpoint may be others' own.
        may_differ = not is_trained or any(map(_are_numbers, (own, trained)))
        if may_differ and not set(own) & set(trained):
            continue
        setting = f'{name}_dataloader.dataset'
        try:
            follow(trained)
        except ValueError as error:
            raise ValueError(f'{setting}: {error}') from error
        loop.evaluator.dataset_meta = dataset.metainfo
        runner.logger.info(
            f'{setting}: has {len(own)} of the {len(trained)} classes of training, and labels are '
            'numbered as there'
        )


def _classes(metainfo: Any) -> list[str]:
    classes = metainfo.get('classes') if isinstance(metainfo, Mapping) else None
    return list(classes) if isinstance(classes, Sequence) and not isinstance(classes, str) else []


def _ids(metainfo: Any) -> dict[str, int]:
    """Numbers of classes by their names, where the data state them (COCO's categories)."""
    ids = metainfo.get('category_ids') if isinstance(metainfo, Mapping) else None
    return dict(ids) if isinstance(ids, Mapping) else {}


def _check_ids(setting: str, own: dict[str, int], trained: dict[str, int], by_id: bool) -> None:
    """Raise ValueError for a class with another number than in training, or another's number.

    Args:
        setting: What has the classes ``own``.
        own: Numbers by names.
        trained: Those of training.
        by_id: Whether another name is another class.
    """
    names = {number: name for name, number in trained.items()}
    for name, number in own.items() if trained else ():
        there = trained.get(name, number)
        if there != number or (by_id and names.get(number, name) != name):
            raise ValueError(
                f'{setting}: the category {name!r} has the id {number}, which in training '
                + (f'is {there}' if there != number else f'is that of {names[number]!r}')
                + '; a detector learns ids, so give the categories the same in both files'
            )


def _are_numbers(classes: list[str]) -> bool:
    return classes == [str(number) for number in range(len(classes))]
