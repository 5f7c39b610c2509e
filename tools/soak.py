"""Trains, breaks off and resumes at random, and proves that the result shows nothing of it.

    python tools/soak.py --minutes 30 --results docs/reliability_soak.json
    python tools/soak.py --kills-only 200

A campaign is one training that is broken off again and again: in one process or on two ranks, with
checkpoints in files or in shards. Where it ends, every loss that any of its attempts has seen has
to be, bit for bit, the one of a training that nothing happened to, and so have the weights.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from soak_attempt import CONFIG, FORMS, ROOT, SAMPLES, Attempt, Form

sys.path.insert(0, str(ROOT / 'tools/benchmarks'))

import measuring
import torch

DISK_MIB = 64
UNFINISHED = '.*.partial'  # what a checkpoint is called while it is written
STOPS = {
    'SIGTERM': 143,
    'SIGINT': 130,
    'SIGHUP': 129,
    'SIGUSR1': 75,
    'SIGUSR2': 75,
}  # their statuses


class Soak:
    """Campaigns, and what has happened in them."""

    def __init__(self, folder: Path, disk: Path | None, seed: int, iterations: int) -> None:
        self.folder, self.disk, self.iterations = folder, disk, iterations
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.resident_growth_kib: dict[str, int] = {}
        self.whole = {form: self._uninterrupted(form) for form in FORMS}
        assert self.whole[FORMS[0]] == self.whole[FORMS[1]], 'shards or not made a difference'
        assert self.whole[FORMS[2]] == self.whole[FORMS[3]], 'shards or not made a difference'

    def _make(self, name: str, form: Form) -> Path:
        folder = self.folder / name
        folder.mkdir()
        settings = dict(batch_size=SAMPLES // form.ranks, sharded=form.suffix == '.dcp')
        text = CONFIG.format(root=ROOT, iterations=self.iterations, **settings)
        (folder / 'config.py').write_text(text)
        return folder

    def _uninterrupted(self, form: Form) -> list[dict[str, str]]:
        name = f'whole_{form.ranks}{form.suffix}'
        folder = self._make(name, form)
        attempt = Attempt(form, folder, folder / 'work', 'whole')
        statuses = attempt.end()
        assert statuses == [0] * form.ranks, f'{statuses}: {attempt.log}'
        lines = (folder / 'seen_by_0.txt').read_text().splitlines()[self.iterations // 4 : -1]
        resident = [int(line.split()[2]) for line in lines]
        growth = min(resident[-len(resident) // 3 :]) - min(resident[: len(resident) // 3])
        self.resident_growth_kib[name] = growth // 1024
        return self._seen(folder, form)

    def _seen(self, folder: Path, form: Form) -> list[dict[str, str]]:
        """By rank: the loss of each iteration, and the weights at the end."""
        ranks = []
        for rank in range(form.ranks):
            seen: dict[str, str] = {}
            for line in (folder / f'seen_by_{rank}.txt').read_text().splitlines():
                iteration, value, _ = line.split()
                before = seen.setdefault(iteration, value)
                assert before == value, f'{folder}: two values of iteration {iteration}'
            ranks.append(seen)
        return ranks

    def campaign(self, number: int, kinds: Sequence[str], wanted: int | None, until: float) -> None:
        """One training, broken off until the time is up or so many faults have happened.

        Raises:
            AssertionError: When anything differs from the training that nothing happened to.
        """
        form = FORMS[number % len(FORMS)]
        folder = self._make(f'campaign_{number}', form)
        work_dir = (self.disk or folder) / f'work_{number}'
        happened: Counter[str] = Counter()
        is_over, attempts = False, 0
        while not is_over:
            attempts += 1
            attempt = Attempt(form, folder, work_dir, f'attempt_{attempts}')
            enough = time.monotonic() > until or wanted == happened.total() + self.faults.total()
            kind = '' if enough else self.random.choice(kinds)
            what = kind and self._break_off(attempt, kind, work_dir)
            if what:
                happened[f'{what}, {form.ranks} rank(s), {form.suffix}'] += 1
            statuses = attempt.end()
            is_over = statuses == [0] * form.ranks
            assert is_over or kind, f'{statuses} without a fault: {attempt.log}'
        seen, whole = self._seen(folder, form), self.whole[form]
        # Rank 0 may save an iteration before another rank has noted it, which then is killed.
        noted = [
            of_rank.items() <= all_of_it.items()
            for of_rank, all_of_it in zip(seen, whole, strict=True)
        ]
        is_whole = seen[0] == whole[0] and all(str(self.iterations) in of_rank for of_rank in seen)
        assert all(noted) and is_whole, f'{folder}: another training'
        self.faults += happened
        print(f'campaign {number}, {form}: {attempts} attempts, {dict(happened)}', flush=True)
        shutil.rmtree(work_dir)

    def _break_off(self, attempt: Attempt, kind: str, work_dir: Path) -> str:
        """Do harm to an attempt that is under way; what it was, or nothing if that has ended."""
        if not attempt.reach(b'i', self.random.randint(1, 20)):
            return ''
        if kind == 'disk full':
            with self._full_disk():
                attempt.reach(b's', self.random.randint(1, 4))
            return kind
        if kind == 'kill in a save':
            if not attempt.reach(b's', 1):
                return ''
            self._see_a_file_grow(work_dir)
        number = signal.SIGKILL if kind not in STOPS else signal.Signals[kind]
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.random.choice(attempt.left), number)
        statuses = attempt.end()
        if kind in STOPS:
            assert set(statuses) <= {STOPS[kind], 0}, f'{kind}: {statuses}: {attempt.log}'
        if any(work_dir.glob(UNFINISHED)):
            return 'kill in mid-save'
        if kind == 'flipped bit' and not self._flip_a_bit(work_dir):
            return 'kill'
        return kind

    def _see_a_file_grow(self, work_dir: Path) -> None:
        until = time.monotonic() + 1
        while not any(work_dir.glob(UNFINISHED)) and time.monotonic() < until:
            pass
        time.sleep(self.random.choice((0, 0.002)) * self.random.random())

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        """Within it, hardly anything is left of the disk."""
        assert self.disk is not None
        filler = self.disk / 'filler'
        with contextlib.suppress(OSError), open(filler, 'wb', buffering=0) as file:
            while file.write(bytes(2**12)):
                pass
        try:
            yield
        finally:
            filler.unlink()

    def _flip_a_bit(self, work_dir: Path) -> bool:
        """In a file of the newest checkpoint; False if there is none before it to go on from."""
        checkpoints = sorted(work_dir.glob('iter_*'), key=lambda path: int(path.stem[5:]))
        if len(checkpoints) < 2:
            return False
        newest = checkpoints[-1]
        file = self.random.choice([p for p in newest.rglob('*') if p.is_file()] or [newest])
        content = bytearray(file.read_bytes())
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        file.write_bytes(content)
        return True


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk that can be filled; None where this process may not mount one."""
    folder.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', f'size={DISK_MIB}m', 'soak', str(folder)]
    if shutil.which('mount') is None or subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(['umount', '--lazy', str(folder)], check=True)  # somebody may hang in it


def main(argv: Sequence[str] | None = None) -> None:
    """Soak, and write what has happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--minutes', type=float, help='how long (without an end)')
    parser.add_argument('--kills-only', type=int, metavar='N', help='SIGKILL and nothing else')
    parser.add_argument('--seed', type=int, default=0, help='of what happens when')
    parser.add_argument('--iterations', type=int, default=200, help='of a training')
    parser.add_argument('--results', type=Path, help='JSON to add the result to')
    args = parser.parse_args(argv)
    started = time.monotonic()
    until = float('inf') if args.minutes is None else started + 60 * args.minutes
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix='soak_'))  # stays if something fails
        disk = stack.enter_context(small_disk(folder / 'disk'))
        kinds = ['kill', 'kill in a save', 'kill in a save']
        if args.kills_only is None:
            kinds += [*STOPS, 'flipped bit'] + ['disk full'] * (disk is not None)
        soak = Soak(folder, disk, args.seed, args.iterations)
        number = 0
        while time.monotonic() < until and soak.faults.total() != args.kills_only:
            soak.campaign(number, kinds, args.kills_only, until)
            number += 1
    growth = max(soak.resident_growth_kib.values())
    assert growth < 1024, f'the resident memory grows: {soak.resident_growth_kib}'
    what = f'--kills-only {args.kills_only}' if args.kills_only else f'--minutes {args.minutes}'
    words = f'{what} --seed {args.seed} --iterations {args.iterations}'
    result = {
        'run': measuring.where(torch.device('cpu')) | {'command': f'python tools/soak.py {words}'},
        'minutes': round((time.monotonic() - started) / 60, 1),
        'campaigns': number,
        'faults': dict(sorted(soak.faults.items())),
        'different_losses': 0,
        'resident_growth_kib': soak.resident_growth_kib,
    }
    print(json.dumps(result, indent=1))
    if args.results:
        name = f'{"kills" if args.kills_only else "soak"}, seed {args.seed}'
        known = json.loads(args.results.read_text()) if args.results.exists() else {}
        args.results.write_text(json.dumps({**known, name: result}, indent=1) + '\n')
    shutil.rmtree(folder)


if __name__ == '__main__':
    main()
