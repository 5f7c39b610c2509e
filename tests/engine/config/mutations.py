"""What people get wrong in a config, made at random from the configs that are shipped.

A mutation changes one thing: a letter of a key, the type or the range of a value, an entry that is
left out, or two settings that cannot both hold. It goes into the config, or, where a command line
can say it, through ``--cfg-options``.
"""

import copy
import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import Config

from memengine.engine.cli.parser import make_parser
from memengine.engine.config.check import check_config
from memengine.engine.config.file import merge_options

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / 'configs').rglob('*.py')
    if '_base_' not in path.parts
)
REMOVED = object()

WRONG_TYPES: Mapping[type, Sequence[Any]] = {
    bool: ('True', 'no', 3, [True], {'on': True}),
    int: ('x', '5', 2.5, True, [1], {'value': 1}, None),
    float: ('x', '0.1', True, [0.1], {'value': 1.0}, None),
    str: (3, 0.5, True, [7], {'a': 1}, None),
    list: ('x', 7, {'a': 1}, None),
    dict: ('x', 7, 0.5, None),
    type(None): ('x', True),
}
OUT_OF_RANGE = (-1, -3, 0, -0.5, float('nan'), float('inf'))


@dataclass(frozen=True)
class Mutation:
    """One thing that is changed.

    Attributes:
        config: Path of the config.
        kind: What is done to it.
        changes: Dotted path to new value, or ``REMOVED``.
        by_option: Whether it goes through ``--cfg-options``.
    """

    config: str
    kind: str
    changes: tuple[tuple[str, Any], ...]
    by_option: bool = False

    @property
    def path(self) -> str:
        """The first path that is changed."""
        return self.changes[0][0]

    @property
    def value(self) -> Any:
        """What stands at the path now."""
        return self.changes[0][1]

    def __str__(self) -> str:
        changes = ', '.join(
            f'{path} removed' if value is REMOVED else f'{path}={value!r}'
            for path, value in self.changes
        )
        return f'{self.config}{" (option)" if self.by_option else ""}: {self.kind}: {changes}'

    def check(self) -> None:
        """Check the changed config.

        Raises:
            ValueError: As the checker, or the command line, says.
        """
        config = copy.deepcopy(shipped(self.config))
        if self.by_option:
            pairs = [f'{path}={as_text(value)}' for path, value in self.changes]
            arguments = ['train', self.config, '--cfg-options', *pairs]
            merge_options(config, make_parser().parse_args(arguments).cfg_options)
        else:
            for path, value in self.changes:
                put(config, path, value)
        check_config(config)


@functools.cache
def shipped(name: str) -> Config:
    """A config that is shipped."""
    return Config.fromfile(ROOT / name)


def nodes(value: Any, path: str = '') -> Iterator[tuple[str, Any]]:
    """All entries below a value, each with its dotted path."""
    pairs = enumerate(value) if isinstance(value, (list, tuple)) else value.items()
    for key, below in pairs:
        where = f'{path}.{key}' if path else str(key)
        yield where, below
        if isinstance(below, (Mapping, list, tuple)):
            yield from nodes(below, where)


def put(config: Any, path: str, value: Any) -> None:
    """Set an entry by its path, or remove it."""
    above, _, last = path.rpartition('.')
    holder = functools.reduce(entry, above.split('.'), config) if above else config
    if isinstance(holder, tuple):  # a list in its place
        put(config, above, list(holder))
        holder = functools.reduce(entry, above.split('.'), config)
    key = int(last) if isinstance(holder, list) else last
    if value is REMOVED:
        holder.pop(key)
    else:
        holder[key] = value


def entry(holder: Any, key: str) -> Any:
    """An entry of a dict or list."""
    return holder[int(key) if isinstance(holder, (list, tuple)) else key]


def as_text(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return f'[{",".join(map(as_text, value))}]'
    return repr(value) if isinstance(value, Mapping) else str(value)


def misspelt(word: str, draw: random.Random) -> str:
    """A word with a letter left out, doubled, changed, or with two of them swapped."""
    at = draw.randrange(len(word) - 1)
    made = {
        word[:at] + word[at + 1 :],
        word[: at + 1] + word[at:],
        word[:at] + 'z' + word[at + 1 :],
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
    }
    return draw.choice(sorted(made - {word}))


def mutations(count: int, seed: int = 0) -> list[Mutation]:
    """So many different ones, of every config and every kind, in an order drawn from a seed."""
    draw = random.Random(seed)
    everywhere = {name: list(nodes(shipped(name))) for name in CONFIGS}
    found: dict[str, Mutation] = {}
    while len(found) < count:
        name = CONFIGS[len(found) % len(CONFIGS)]
        if draw.random() < 0.1:
            made = contradiction(name, draw)
        else:
            made = of_entry(name, *draw.choice(everywhere[name]), draw)
        if made is not None:
            found.setdefault(str(made), made)
    return list(found.values())


def of_entry(name: str, path: str, value: Any, draw: random.Random) -> Mutation | None:
    """A mutation of one entry, of a kind that is possible there."""
    above, _, key = path.rpartition('.')
    kinds = ['type', 'type', 'removed']
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        kinds += ['range', 'range']
    if not key.isdigit() and len(key) > 2:
        kinds += ['key']
    if key == 'type':
        kinds += ['name'] * 3
    match kind := draw.choice(kinds):
        case 'removed':
            return Mutation(name, kind, ((path, REMOVED),))
        case 'key':
            wrong = '.'.join(filter(None, (above, misspelt(key, draw))))
            return Mutation(name, kind, ((wrong, value), (path, REMOVED)))
        case 'name':
            new = misspelt(value, draw)
        case 'range':
            new = draw.choice(OUT_OF_RANGE)
        case 'type':
            likes = dict if isinstance(value, Mapping) else list if is_list(value) else type(value)
            new = draw.choice(WRONG_TYPES[likes])
    if new == value and type(new) is type(value):
        return None
    by_option = draw.random() < 0.4 and not is_read_otherwise(new)
    return Mutation(name, kind, ((path, new),), by_option)


def is_list(value: Any) -> bool:
    """Whether it is a list in a config."""
    return isinstance(value, (list, tuple))


def is_read_otherwise(value: Any) -> bool:
    """Whether the command line reads a value as one of another type."""
    return (
        isinstance(value, str) and value not in ('x', 'no') and not re.match('[A-Z](?!rue)', value)
    )


def contradiction(name: str, draw: random.Random) -> Mutation:
    """Settings that cannot hold together, or that one of three is without the others."""
    config = shipped(name)
    loader = draw.choice(['train_dataloader', 'val_dataloader', 'test_dataloader'])
    interval = draw.choice([0, -2, 'x', 1.5])
    number = draw.choice([-1, 0, 'x'])
    scheduler = 'param_scheduler.0' if is_list(config.param_scheduler) else 'param_scheduler'
    changes = draw.choice(
        [
            {'train_cfg.max_iters': 10},
            {'train_cfg.by_epoch': False},
            {f'{loader}.num_workers': 0, f'{loader}.persistent_workers': True},
            {f'{loader}.num_workers': 0, f'{loader}.prefetch_factor': 2},
            {f'{loader}.shuffle': True},
            {f'{loader}.timeout': draw.choice([-1, 'x'])},
            {loader: None},
            {'val_cfg': None},
            {'test_evaluator': None},
            {'optim_wrapper': None},
            {f'{scheduler}.begin': 7, f'{scheduler}.end': draw.choice([7, 3, -3])},
            {f'{scheduler}.begin': -3},
            {f'default_hooks.{draw.choice(["logger", "checkpoint"])}.interval': interval},
            {'default_hooks.checkpoint.max_keep_ckpts': number},
            {'log_processor.window_size': number},
            {'custom_hooks': [{'type': 'CollapseHook', 'interval': interval}]},
            {'custom_hooks': [{'type': 'CollapsHook'}]},
            {'env_cfg': {'dist_cfg': {'timeout': number}}},
            {'randomness': {'seed': draw.choice(['x', -1, 0.5])}},
            {'launcher': draw.choice(['slrum', 3])},
            {'log_level': draw.choice(['info', 3])},
            {'resume': draw.choice(['no', 1])},
            {'compile': {'mod': 'default'}},
            {'auto_scale_lr': {'base_batch_size': number}},
            {'compile': True, 'compile_blocks': True},
            {'dropit': {'gamma': draw.choice([1.5, -0.1, float('nan')])}},
            {'activation_offload': True, 'compile_blocks': True, 'dropit': {'gama': 0.5}},
            {'optim_wrapper.accumulative_counts': number},
            {'optim_wrapper.clip_grad': {'max_norm': draw.choice([-1, 0, 'x'])}},
            {'optim_wrapper.paramwise_cfg': {'norm_decay_mult': draw.choice(['x', -1])}},
        ]
    )
    by_option = draw.random() < 0.4 and all(not is_read_otherwise(v) for v in changes.values())
    return Mutation(name, 'contradiction', tuple(changes.items()), by_option)
