"""One sentence for what went wrong: the setting's name where it is known, the cause, a remedy."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memengine.engine.config.schema.types import arguments_of
from memengine.engine.distributed.launchers import DEFAULT_TIMEOUT_S
from memengine.suggest import did_you_mean

__all__ = ['explain', 'explain_lost_connection']

MAX_LENGTH = 1000

# Errors whose text says what happened; others need their name, and where they happened.
_SELF_EXPLANATORY = (ValueError, OSError, RuntimeError, ImportError, NotImplementedError)

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|Unable to allocate|bad_alloc"
    r'|killed by signal: (?:Killed|Bus error)|insufficient shared memory',
    re.IGNORECASE,
)
_WORKER_ERROR = re.compile(r'Caught (\w+) in DataLoader worker process \d+\.\s+Original Traceback')
_WORKERS_LOADER = re.compile(r'(\w+_dataloader): a worker \(pid')
_CLASS_PREFIXES = re.compile(
    r'(?:class `(\w+)` in [\w./\\-]+: )+'
)  # of MMEngine's older registries
_ADDRESS = re.compile(r'<([\w.]+) object at 0x[0-9a-f]+>')
_UNEXPECTED = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")


def explain(error: BaseException, cfg: Mapping[str, Any] | None = None) -> str:
    """Describe an error to the user.

    Returns:
        A sentence; several lines only when there are several problems in a config.
    """
    if hasattr(error, 'problems'):
        return str(error)
    text = _message(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return _out_of_memory(text, cfg)
    if not isinstance(error, _SELF_EXPLANATORY) or not text:
        text = f'{type(error).__name__}: {text}' if text else type(error).__name__
    return _setting_prefix(error, cfg) + text + _similar_names(error) + _location(error)


def explain_lost_connection(error: BaseException, cfg: Mapping[str, Any] | None = None) -> str:
    """Describe an error for which :func:`lost_connection` holds, while a run starts."""
    if not re.search(r'time(?:d )?out', str(error), re.IGNORECASE):
        return 'the connection to another rank was lost; its own error says why'
    dist_cfg = ((cfg or {}).get('env_cfg') or {}).get('dist_cfg') or {}
    waited = dist_cfg.get('timeout', DEFAULT_TIMEOUT_S)
    return (
        f'another rank did not answer within {waited} s (env_cfg.dist_cfg.timeout): it hangs, or '
        'needs longer for an iteration, a checkpoint or the evaluation; its own error says why'
    )


def _message(error: BaseException) -> str:
    """The error's own words, on one line."""
    text = (
        str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    )
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f'{error.strerror}: {error.filename}'
    if worker := _WORKER_ERROR.search(text):
        text = text.rpartition(f'\n{worker[1]}: ')[2] or text
    if prefixes := _CLASS_PREFIXES.match(text):
        text = f'{prefixes[1]}: {text[prefixes.end() :]}'
    text = ' '.join(_ADDRESS.sub(r'\1', text).split())
    return text if len(text) <= MAX_LENGTH else f'{text[:MAX_LENGTH]} ...'


def _out_of_memory(text: str, cfg: Mapping[str, Any] | None) -> str:
    loader = (cfg or {}).get('train_dataloader')
    size = loader.get('batch_size') if isinstance(loader, Mapping) else None
    now = f' (now {size})' if size else ''
    is_short_of_shared = 'shared memory' in text or 'Bus error' in text
    if is_short_of_shared or 'killed by signal' in text:
        named = _WORKERS_LOADER.search(text)
        lower = f'lower {named[1] if named else "train_dataloader"}.num_workers'
        if is_short_of_shared:
            return f'a data-loader worker ran out of memory: {lower}; {text}'
        return (
            'a data-loader worker was killed, by the system if memory ran out (its log says so): '
            f'then {lower}; {text}'
        )
    first = text.partition('. ')[0] or 'no more memory'
    optim = (cfg or {}).get('optim_wrapper')
    if isinstance(optim, Mapping) and {'chunk_size', 'micro_batch_size'} & optim.keys():
        return (
            f'out of memory: {first}. Not even the smallest slice fits: use --amp bf16, or '
            "activation_checkpointing=['blocks']"
        )
    return (
        f'out of memory: {first}. Keep train_dataloader.batch_size{now} and run it in slices: '
        "optim_wrapper.type='GradCacheOptimWrapper' with chunk_size=16 where samples meet in the "
        "loss (SimCLR, CLIP, ...), 'AccumulationOptimWrapper' with micro_batch_size=16 elsewhere; "
        "or use --amp bf16, or activation_checkpointing=['blocks']"
    )


def _similar_names(error: BaseException) -> str:
    """The names near an argument that was not expected, or near a key that was not there."""
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        held = [v for v in _innermost_locals(error) if isinstance(v, Mapping)]
        return did_you_mean(error.args[0], {k for v in held for k in v if isinstance(k, str)})
    for cause in (error, error.__cause__):
        unexpected = _UNEXPECTED.search(str(cause)) if isinstance(cause, TypeError) else None
        if cause is not None and unexpected and 'Did you mean' not in str(cause):
            for value in _innermost_locals(cause):
                if callable(value) and getattr(value, '__name__', None) == unexpected[1]:
                    return did_you_mean(unexpected[2], arguments_of(value).names)
    return ''


def _innermost_locals(error: BaseException) -> list[Any]:
    """What the function that raised had at hand."""
    return [value for frame in _frames(error)[-1:] for value in frame.f_locals.values()]


def _frames(error: BaseException) -> list[Any]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_user_code(frame: Any) -> bool:
    """Whether the code is neither memengine's, nor a library's, nor the script that started all."""
    file, module = frame.f_code.co_filename, frame.f_globals.get('__name__')
    libraries = (str(Path(__file__).parents[1]), sysconfig.get_path('stdlib'), '<')
    return 'site-packages' not in file and module != '__main__' and not file.startswith(libraries)


def _is_memengine_code(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(str(Path(__file__).parents[1]))


def _location(error: BaseException) -> str:
    """File and line, where the error's own words may not be enough to find it.

    Of an error that the user's code or a library ran into, not of one that was raised on purpose:
    the innermost line of the user's code, or else the innermost line.
    """
    steps = list(traceback.walk_tb(error.__traceback__))
    users = [step for step in steps if _is_user_code(step[0])]
    on_purpose = not users or steps[-1] == users[-1] or _is_memengine_code(steps[-1][0])
    if _WORKER_ERROR.search(str(error)) or (isinstance(error, _SELF_EXPLANATORY) and on_purpose):
        return ''
    for frame, line in (users or steps)[-1:]:
        file = Path(frame.f_code.co_filename)
        return f' ({file.name if users else f"{file.parent.name}/{file.name}"}, line {line})'
    return ''


def _setting_prefix(error: BaseException, cfg: Mapping[str, Any] | None) -> str:
    """``'model.backbone (TimmBackbone): '`` when that was being built or at work; else nothing."""
    if cfg is None:
        return ''
    path: list[str] = []
    name, subtree = '', cfg
    for built in _configs_being_built(error):
        found = _find_origin(built, subtree)
        if found is not None:
            below, subtree = found
            path += below
            kind = built.get('type', '')
            name = str(getattr(kind, '__name__', kind))
    if not path:
        path, name = _setting_on_stack(error, cfg)
    if not path:
        return ''
    return (
        f'{".".join(path)} ({name}): ' if name and name not in str(error) else f'{".".join(path)}: '
    )


def _setting_on_stack(error: BaseException, cfg: Mapping[str, Any]) -> tuple[list[str], str]:
    """Path and type of the innermost object on the stack that is of one type of the config."""
    paths: dict[str, list[list[str]]] = {}
    for path, entry in _nested_dicts(cfg, []):
        kind = entry.get('type')
        name = kind.rpartition('.')[2] if isinstance(kind, str) else getattr(kind, '__name__', '')
        paths.setdefault(name, []).append(path)
    for frame in reversed(_frames(error)):
        name = type(frame.f_locals.get('self')).__name__
        if len(paths.get(name, ())) == 1:
            return paths[name][0], name
    return [], ''


def _configs_being_built(error: BaseException) -> Iterator[Mapping[str, Any]]:
    """The configs from which something was being built, outermost first."""
    for frame in _frames(error):
        code = frame.f_code
        if code.co_name.startswith('build') or code.co_name == 'wrap_model':
            arguments = [frame.f_locals.get(n) for n in code.co_varnames[: code.co_argcount]]
            yield from [each for each in arguments if isinstance(each, Mapping)][:1]


def _find_origin(config: Mapping[str, Any], tree: Any) -> tuple[list[str], Any] | None:
    """Path and value of the dict in ``tree`` that ``config`` was made from."""
    found = [(path, entry) for path, entry in _nested_dicts(tree, []) if _made_from(config, entry)]
    return max(found, key=lambda pair: len(pair[1]), default=None)  # the first of the fullest


def _nested_dicts(tree: Any, path: list[str]) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    """All dicts below ``tree`` that are not empty, outer ones first."""
    is_list = isinstance(tree, (list, tuple))
    for key, entry in enumerate(tree) if is_list else tree.items():
        below = [*path, str(key)]
        if isinstance(entry, Mapping) and entry:
            yield below, entry
        if isinstance(entry, (Mapping, list, tuple)):
            yield from _nested_dicts(entry, below)


def _made_from(config: Any, origin: Any) -> bool:
    """Whether ``config`` has all that ``origin`` says; builders add arguments of their own."""
    if isinstance(origin, Mapping):
        return isinstance(config, Mapping) and all(
            key == 'priority'
            or (key in config and _made_from(config[key], value))  # taken out of hooks
            for key, value in origin.items()
        )
    if isinstance(origin, (list, tuple)):
        same_length = isinstance(config, (list, tuple)) and len(config) == len(origin)
        return same_length and all(map(_made_from, config, origin))
    if isinstance(origin, (str, int, float)) or origin is None:
        return type(config) is type(origin) and config == origin
    return type(config) is type(origin)
