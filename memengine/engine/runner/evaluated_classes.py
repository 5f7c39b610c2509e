"""Data that number classes otherwise than training did, in evaluation or before: they follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.runner import BaseLoop


def keep_trained_classes(runner: Any, checkpoint_meta: Mapping[str, Any]) -> None:
    """Have the labels of a resumed run's data keep the numbers that they were trained by.

    A folder more or less would move those of all classes behind it. New classes come last, where a
    classifier that has no room for them says so.

    Args:
        runner: The run, its loops built.
        checkpoint_meta: That of the checkpoint from which it goes on; empty for none.
    """
    dataset = runner._train_loop.dataloader.dataset
    before, own = (_classes(of) for of in (checkpoint_meta.get('dataset_meta'), _metainfo(dataset)))
    new = [name for name in own if name not in before]
    unnamed = any(map(_are_numbers, (before, own))) and len(new) == len(own)
    is_same = not own or own in (before, [*before, *new])
    if not before or is_same or unnamed or _ids(_metainfo(dataset)):  # COCO's labels are its ids
        return
    follow = getattr(dataset, 'follow_classes', None)
    said = 'classes are not those that the checkpoint was trained on'
    if follow is None:
        kind = type(dataset).__name__
        runner.logger.warning(
            f'train_dataloader.dataset: its {said}, in this order: {", ".join(map(str, before))}. '
            f'{kind} has no follow_classes(), so that labels may stand for other classes now'
        )
        return
    follow([*before, *new], 'the checkpoint')
    gone = [name for name in before if name not in own]
    changes = (('new', new), ('gone', gone))
    told = [f'{what}: {", ".join(map(str, names))}' for what, names in changes if names]
    runner.logger.warning(
        f'train_dataloader.dataset: its {said} ({"; ".join(told) or "in another order"}); labels '
        'keep the numbers that they had'
    )


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
        _metainfo(runner._train_loop.dataloader.dataset)
        if is_trained
        else checkpoint_meta.get('dataset_meta')
    )
    trained = _classes(metainfo)
    loops = {'val_dataloader': runner._val_loop, 'test_dataloader': runner._test_loop}
    loops = {f'{name}.dataset': it for name, it in loops.items() if isinstance(it, BaseLoop)}
    for setting, loop in loops.items():
        own_ids = _ids(_metainfo(loop.dataloader.dataset))
        _check_ids(setting, own_ids, _ids(metainfo), is_trained)
    for setting, loop in loops.items() if trained else ():
        dataset = loop.dataloader.dataset
        follow = getattr(dataset, 'follow_classes', None)
        own = _classes(_metainfo(dataset))
        metrics = getattr(loop.evaluator, 'metrics', ())
        needed = any(getattr(metric, 'needs_trained_classes', False) for metric in metrics)
        if follow is None or not needed or not own or own == trained:
            continue
        # Numbers stand for names that are not known; those of a checkpoint may be others' own.
        may_differ = not is_trained or any(map(_are_numbers, (own, trained)))
        if may_differ and not set(own) & set(trained):
            continue
        try:
            follow(trained)
        except ValueError as error:
            raise ValueError(f'{setting}: {error}') from error
        loop.evaluator.dataset_meta = dataset.metainfo
        runner.logger.info(
            f'{setting}: has {len(own)} of the {len(trained)} classes of training, and labels are '
            'numbered as there'
        )


def _metainfo(dataset: Any) -> Any:
    return getattr(dataset, 'metainfo', None)


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
