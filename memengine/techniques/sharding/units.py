"""Which modules of a model are gathered and freed by themselves when it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from memengine.techniques.modules.blocks import Selector, find_blocks, select_modules

# A callable is a wrap policy as of FSDP1: policy(module=, recurse=, nonwrapped_numel=) -> bool.
Units: TypeAlias = Selector | Sequence[Selector] | int | Callable[..., bool] | None


def choose_units(model: nn.Module, units: Units = None, fine: bool = False) -> list[str]:
    """Names of the modules that are gathered and freed by themselves, inner ones first.

    Args:
        model: Not sharded yet.
        units: None for the model's repeated blocks, or nothing where it has none; names, globs and
            classes as for :func:`~memengine.techniques.select_modules`; a whole number for
            modules of at least that many parameters that are in no smaller unit; or a wrap policy
            of FSDP1 (``size_based_auto_wrap_policy``, ``ModuleWrapPolicy``, ...).
        fine: Whether None stands for the blocks' parts, say attention and MLP, in place of whole
            blocks. torch's own blocks stay whole, as they use their children's weights themselves.

    Raises:
        ValueError: For a number below 1, and as ``select_modules``.
    """
    if units is None:
        blocks = find_blocks(model)
        return (
            [unit for name in blocks for unit in _parts(name, blocks[name])] if fine else [*blocks]
        )
    if isinstance(units, int):
        if units < 1:
            raise ValueError(f'units: a unit has at least 1 parameter, got {units}')
        least = units
        return _by_policy(model, lambda nonwrapped_numel, **_: nonwrapped_numel >= least)
    if not isinstance(units, (str, type, Sequence)):
        return _by_policy(model, units)
    return list(select_modules(model, units, setting='units')) if units else []


def check_tied_weights(model: nn.Module, units: Sequence[str]) -> None:
    """Refuse units that part a weight from itself, as each unit is gathered by itself.

    Args:
        model: Not sharded yet.
        units: Names of the modules that are to be units.

    Raises:
        ValueError: For a parameter that several units hold, or a unit and the rest of the model.
    """
    names = {model.get_submodule(name): name for name in units}
    places: dict[nn.Parameter, dict[str, str]] = {}  # its name in each unit

    def visit(path: str, module: nn.Module, unit: str) -> None:
        unit = names.get(module, unit)
        for key, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, {}).setdefault(unit, f'{path}{key}')
        for key, child in module.named_children():
            visit(f'{path}{key}.', child, unit)

    visit('', model, '')
    for found in places.values():
        if len(found) > 1:
            (one, name), (other, tied) = list(found.items())[:2]
            raise ValueError(
                f'units: {name} and {tied} are one parameter, but the one is in '
                f'{one or "no unit"} and the other in {other or "no unit"}, which are gathered at '
                f'different times; name units without {" and ".join(filter(None, (one, other)))}'
            )


def _parts(name: str, block: nn.Module) -> list[str]:
    """A block's children that hold weight matrices; the block itself where these are not most of
    it, or do not run by being called."""
    children = {
        key: child
        for key, child in block.named_children()
        if any(parameter.ndim > 1 for parameter in child.parameters())
    }
    inside = sum(p.numel() for child in children.values() for p in child.parameters())
    whole = sum(p.numel() for p in block.parameters())
    is_called = not any(isinstance(c, (nn.ModuleList, nn.ModuleDict)) for c in children.values())
    if type(block).__module__.startswith('torch.') or not is_called or inside < 0.9 * whole:
        return [name]
    return [f'{name}.{key}' for key in children]


def _by_policy(model: nn.Module, policy: Callable[..., bool]) -> list[str]:
    """What FSDP1 would wrap: the policy is asked whether to look into a module, and afterwards
    whether to wrap what its wrapped children have left of it."""
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> int:
        numel = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(
            visit(f'{name}.{key}' if name else key, child) for key, child in module.named_children()
        )
        has_forward = type(module) not in (nn.ModuleList, nn.ModuleDict)
        rest = numel - wrapped
        if name and has_forward and policy(module=module, recurse=False, nonwrapped_numel=rest):
            found.append(name)
            return numel
        return wrapped

    visit('', model)
    return found
