"""``memengine techniques``: what there is, and all of one technique, from its description."""

from __future__ import annotations

from typing import Any

from memengine.suggest import did_you_mean
from memengine.technique import Technique, in_order, settings_of, techniques


def list_techniques() -> str:
    """A line for each technique: its key, its gradients, and what one types for it."""
    found = techniques()
    width = max(map(len, found))
    lines = [
        f'{key:{width}}  {technique.exactness:8}  {technique.typed}'
        for key, technique in found.items()
    ]
    return '\n'.join([*lines, '', 'memengine techniques NAME says all of one'])


def describe(key: str) -> str:
    """All that the description of a technique says."""
    found = techniques()
    if key not in found:
        from memengine.engine.config.error import ConfigError

        raise ConfigError(f"there is no technique '{key}'{did_you_mean(key, found)}")
    technique = found[key]
    lines = [
        f'{key}: {technique.title}',
        '',
        f'use it when  {technique.use_when}',
        f'saves        {technique.saves}',
        f'price        {technique.price}',
        f'gradients    {technique.exactness}',
        f'in a config  {technique.typed}',
    ]
    if technique.call:
        lines.append(f'in a loop    {technique.call}')
    if technique.apply:
        order = [f'[{t.key}]' if t.key == key else t.key for t in in_order(found.values())]
        lines.append(f'order        {" → ".join(order)}')
    lines += ['', *_settings(technique)]
    for other in found.values():
        for name in other.conflicts:
            if key in (other.key, name.partition('.')[0]):
                lines.append(str(other.refusal(name)))
    return '\n'.join(lines).rstrip()


def _settings(technique: Technique[Any]) -> list[str]:
    """Two lines for each setting: its type, default and unit; its help."""
    path = technique.name.partition('=')[0]
    path = path if technique.apply else path.rpartition('.')[0]
    lines = []
    for name, one in settings_of(technique.settings).items():
        unit = one.field.metadata['unit']
        default = '' if one.is_required else f'; default {one.field.default!r}'
        lines += [
            f'{path}.{name}: {one.wanted}{unit and f" ({unit})"}{default}',
            f'    {one.field.metadata["help"]}',
        ]
    return [*lines, ''] if lines else []
