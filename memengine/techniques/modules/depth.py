"""Models of fewer blocks: what one of many equal blocks takes is seen on a few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

FEWEST = 3  # blocks: a first one, a last one, and one between


def lists_of_blocks(model: nn.Module) -> dict[str, int]:
    """Lists of equal blocks by their names, and how many blocks each of them holds.

    Blocks are equal if their class is, and their parameters' names, shapes and types.
    """
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and len(module) > FEWEST
    }
    return {name: count for name, count in lists.items() if _are_equal(model.get_submodule(name))}


def _are_equal(blocks: nn.Module) -> bool:
    kinds = {_kind(block) for block in blocks.children()}
    return len(kinds) == 1 and bool(kinds.pop()[1])


def _kind(block: nn.Module) -> tuple[Any, ...]:
    parameters = ((name, p.shape, p.dtype) for name, p in block.named_parameters())
    return type(block), tuple(parameters)


def shorten(model: nn.Module, blocks: Mapping[int, int]) -> None:
    """Take the last blocks of long lists away, in place.

    Args:
        model: With lists of equal blocks.
        blocks: How many are left of a list, by how many it holds.
    """
    for name, count in lists_of_blocks(model).items():
        if count in blocks:
            del model.get_submodule(name)[blocks[count] :]  # type: ignore[operator]


def place_of(name: str, lists: Mapping[str, int]) -> str:
    """A name that does not depend on depth: of the first block, the last, or one between.

    Args:
        name: Of a module.
        lists: Names of lists of blocks, and how many each of them holds.
    """
    for blocks, count in lists.items():
        if name.startswith(f'{blocks}.'):
            index, *inner = name[len(blocks) + 1 :].split('.')
            place = {0: 'first', count - 1: 'last'}.get(int(index), 'another')
            return '.'.join([blocks, place, *inner])
    return name
