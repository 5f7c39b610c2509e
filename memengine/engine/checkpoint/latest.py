"""Which checkpoint a run goes on from: the newest, or the one before if that is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from os.path import exists
from pathlib import Path

from memengine.engine.checkpoint.files import CheckpointError, backup_path, read_pickle
from memengine.engine.checkpoint.sharded import RUN_FILE, SUFFIX, is_sharded

_READ_ONLY_SCHEMES = (
    'http',
    'https',
    'modelzoo',
    'torchvision',
    'open-mmlab',
    'openmmlab',
    'mmcls',
)


def find_latest(work_dir: str | Path) -> str | Path | None:
    """The checkpoint that a run in this work dir goes on from if it is whole.

    Raises:
        CheckpointError: When ``last_checkpoint`` is there, but no checkpoint.
    """
    return next(newest_first(work_dir), None)


def checkpoint_of(path: str | Path) -> str:
    """A checkpoint by its own path, or by the folder of its run.

    Args:
        path: A checkpoint or a URL, which is given back as it is; or a work dir, of which the best
            checkpoint is taken where training has kept one (``save_best``), else the newest.

    Raises:
        CheckpointError: When there is none in the folder, or the best of several metrics.
    """
    text = str(path)
    if not is_run(text):
        return text
    best = sorted(p for p in Path(path).glob('best_*') if p.suffix in ('.pth', SUFFIX))
    if len(best) > 1:
        names = ', '.join(file.name for file in best)
        raise CheckpointError(f'{path} holds the best of several metrics: name one of {names}')
    found = best[0] if best else find_latest(path)
    if found is None:
        raise CheckpointError(f'there is no checkpoint of a run in {path}')
    return str(found)


def is_run(path: str) -> bool:
    """Whether a path is the folder of a run, rather than a checkpoint or a URL."""
    return '://' not in path and Path(path).is_dir() and not is_sharded(path)


def newest_first(
    work_dir: str | Path,
    trusted: Iterable[str] = (),
    warn: Callable[[str], None] = lambda message: None,
) -> Iterator[str | Path]:
    """Checkpoints that training may go on from; whether they are whole is seen when one is read.

    The one that ``last_checkpoint`` names comes first, wherever the work dir is now. Others in the
    work dir (in that one's folder, if checkpoints lie elsewhere) follow by their iterations;
    without an optimiser's state they are left out. What cannot be read comes last: nothing is begun
    from scratch beside it.

    Args:
        work_dir: Where the run was.
        trusted: See :func:`memengine.engine.checkpoint.files.safe_loading`.
        warn: Is told what is wrong, and which checkpoint cannot be read.

    Raises:
        CheckpointError: When ``last_checkpoint`` is there, but no checkpoint, or names one to be
            fetched from where no run saves.
    """
    pointer = Path(work_dir) / 'last_checkpoint'
    text = pointer.read_text(errors='replace').strip() if pointer.is_file() else ''
    if '://' in text:  # of MMEngine's remote storage
        if text.partition('://')[0] in _READ_ONLY_SCHEMES:
            raise CheckpointError(
                f'{pointer} names {text}, where no run saves: others wrote that; if you know '
                'it, go on with --resume and that name'
            )
        yield text
        return
    named = Path(text)
    places = [Path(work_dir) / named.name, named] if text else []
    # A job that was killed while it replaced a folder leaves it as the backup.
    found = next((p for place in places for p in (place, backup_path(place)) if exists(p)), None)
    if found is not None:
        if Path(work_dir).resolve() not in found.resolve().parents:
            warn(f'{pointer} leads out of the work dir, to {found}')
        yield found
    elif pointer.is_file():
        warn(f'{pointer} names {named if text else "nothing"}, which is not there')
    others = _by_iteration(Path(work_dir), trusted, warn)
    if text and not others and exists(named.parent):
        others = _by_iteration(named.parent, trusted, warn)
    others = [path for path in others if path != found]
    yield from others
    if pointer.is_file() and found is None and not others:
        raise CheckpointError(
            f'{pointer} names {named if text else "nothing"}, which is not there, and there is no '
            'other checkpoint to go on from; name one with --resume PATH, or remove '
            'last_checkpoint to train from scratch'
        )


def _by_iteration(folder: Path, trusted: Iterable[str], warn: Callable[[str], None]) -> list[Path]:
    found = []
    for pattern in ('*.pth', f'*{SUFFIX}', f'.*{SUFFIX}.previous'):
        for path in folder.glob(pattern):
            try:
                iteration = _iteration(path, trusted)
            except (CheckpointError, OSError) as error:
                warn(f'passed over: {error}')
                iteration = -1
            if iteration is not None:
                found.append((iteration, path))
    return [path for _, path in sorted(found, reverse=True)]


def _iteration(path: Path, trusted: Iterable[str]) -> int | None:
    """How far a run was; None if the checkpoint does not say, or cannot be gone on from.

    Of a file only the pickle is read, not the tensors.
    """
    file = path / RUN_FILE if path.is_dir() else path
    if not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f'{file} is no file')
    checkpoint = read_pickle(file, trusted, mapped=True)
    if not isinstance(checkpoint, dict) or 'optimizer' not in checkpoint:
        return None
    meta = checkpoint.get('meta')
    iteration = meta.get('iter') if isinstance(meta, dict) else None
    return iteration if isinstance(iteration, int) else None
