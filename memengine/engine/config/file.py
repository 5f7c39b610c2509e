"""Reading a config file and laying ``--cfg-options`` over it, with errors that say where."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.config.utils import ConfigParsingError

from memengine.engine.config.base_files import (
    SHIPPED,
    base_fault,
    base_file,
    config_files,
    existing_config,
    find_config,
    misplaced,
    relative_path,
    similar_files,
)
from memengine.engine.config.check import import_custom_modules, known_keys
from memengine.engine.config.error import ConfigError, unknown_option

__all__ = ['find_config', 'load_config', 'merge_options', 'similar_files']


def load_config(path: str | Path, options: Mapping[str, Any] | None = None) -> Config:
    """Read a config file.

    Args:
        path: A ``.py``, ``.yaml`` or ``.json`` file in MMEngine's config language, or the name of
            a config that comes along (see :func:`find_config`).
        options: Dotted path to value, as ``--cfg-options`` gives them.

    Returns:
        The config, with the modules of ``custom_imports`` imported.

    Raises:
        ConfigError: When the file or one of its bases is not there or has an error (with file and
            line), or an option does not fit.
    """
    path = existing_config(path)
    try:
        with _shipped_bases():
            cfg = Config.fromfile(path, import_custom_modules=False)
    except Exception as error:
        raise ConfigError(_explain_error(error, str(path))) from error
    merge_options(cfg, options or {})
    import_custom_modules(cfg)
    return cfg


@contextmanager
def _shipped_bases() -> Iterator[None]:
    """Have MMEngine find bases of ours, ``memengine::...``; it knows OpenMMLab's packages only."""
    theirs = Config._get_cfg_path

    def path_and_scope(name: str, by: str) -> tuple[str, str | None]:
        return (
            (str(base_file(name, Path(by))), None) if name.startswith(SHIPPED) else theirs(name, by)
        )

    Config._get_cfg_path = staticmethod(path_and_scope)
    try:
        yield
    finally:
        Config._get_cfg_path = staticmethod(theirs)


def _explain_error(error: Exception, path: str) -> str:
    """What is wrong with a config file, from the error that reading it raised."""
    files: dict[Path, Path | None] = {}
    try:
        files.update(config_files(Path(path)))
    except SyntaxError as fault:
        return f'{relative_path(fault.filename or path)}, line {fault.lineno}: {fault.msg}'
    except ValueError as fault:  # bytes that are no text
        return f'{relative_path(path)}: {fault}'
    if isinstance(error, (FileNotFoundError, ConfigParsingError)):
        for file, by in files.items():
            if by is not None and not file.exists():
                base, near = relative_path(file), similar_files(relative_path(file))
                return f'{relative_path(by)}: its base config {base} does not exist{near}'
    if fault_of_base := base_fault(Path(path)):
        return fault_of_base
    steps = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [step for step in steps if Path(step[0].co_filename).resolve() in files]
    location = (
        f'{relative_path(own[-1][0].co_filename)}, line {own[-1][1]}'
        if own
        else relative_path(path)
    )
    innermost = steps[-1][0]
    if innermost.co_name == '__call__' and innermost.co_filename.endswith('lazy.py'):
        return (
            f'{location}: what a config imports is imported only when it is built, so it cannot be '
            'called here; name it in a type, or compute the value yourself'
        )
    return f'{location}: {type(error).__name__}: {_message(error)}'


def _message(error: Exception) -> str:
    only = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    return ' '.join(str(only).split())


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Set entries of a config by dotted path, in place.

    Args:
        cfg: The config.
        options: ``{'optim_wrapper.optimizer.lr': 1e-3, 'param_scheduler.0.end': 5}``. A dict with
            ``_delete_=True`` takes the place of the one that is there.

    Raises:
        ConfigError: When a path leads through something that is no dict and no list, past the end
            of a list, or begins with a key that means nothing.
    """
    problems = [
        problem for path, value in options.items() if (problem := _option_problem(cfg, path, value))
    ]
    if problems:
        raise ConfigError(problems)
    for path, value in options.items():
        *above, last = path.split('.')
        holder = _lookup(cfg, above)
        replaces = not isinstance(value, Mapping) or value.get('_delete_')
        if replaces and holder is not None:  # merging would not replace an entry of a list
            holder[int(last) if isinstance(holder, list) else last] = _whole(value)
        else:
            cfg.merge_from_dict({path: value})


def _whole(value: Any) -> Any:
    """A value that is merged with nothing."""
    if not isinstance(value, Mapping):
        return value
    return ConfigDict({key: _whole(its) for key, its in value.items() if key != '_delete_'})


def _lookup(node: Any, keys: list[str]) -> Any:
    """What is at a path; None where that does not exist yet."""
    for key in keys:
        node = node[int(key)] if isinstance(node, list) else node.get(key)
        if node is None:
            return None
    return node


def _option_problem(cfg: Config, path: str, value: Any) -> str | None:
    """Why an option cannot be set, if so."""
    keys = path.split('.')
    if not all(keys):
        return f'--cfg-options {path}: a path is keys joined by single dots'
    known = known_keys(cfg)
    if keys[0] not in known:
        if keys[0] in cfg:
            return (
                f"--cfg-options {path}: '{keys[0]}' is a name that the config file uses itself; by "
                'now it has been used, so setting it changes nothing: set the places it went to'
            )
        return unknown_option(keys[0], known)
    return misplaced(cfg, path, value)
