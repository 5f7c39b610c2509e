"""What a training step leaves behind, with each technique: tensors, their bytes, resident memory.

``python -m tests.leaks --steps 2000 --results docs/reliability_soak.json`` writes what it finds.
Each technique trains in a process of its own; what it leaves is counted over the second half.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from mmengine.hooks import Hook

from tests.composition import Row, rows, train
from tests.docs_pages import ROOT


class LeakHook(Hook):
    """Counts what lives at the middle of a training and at its end."""

    priority = 'LOWEST'

    def __init__(self, steps):
        self.at, self.counts = (steps // 2, steps), []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 in self.at:
            self.counts.append(alive())


def alive():
    """How many tensors there are, their bytes, and the bytes of the process."""
    gc.collect()
    with warnings.catch_warnings():  # of deprecated classes that are looked at
        warnings.simplefilter('ignore')
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return len(tensors), sum(storages.values()), pages * os.sysconf('SC_PAGE_SIZE')


def leaks_of(row, steps):
    """What the second half of a training leaves: a number of tensors, and bytes a step."""
    hook = LeakHook(steps)
    train(row.models[0], [row], steps, [hook])
    (tensors, nbytes, resident), after = hook.counts
    return {
        'tensors': after[0] - tensors,
        'tensor_bytes_a_step': (after[1] - nbytes) / (steps - steps // 2),
        'resident_bytes_a_step': round((after[2] - resident) / (steps - steps // 2), 1),
    }


def in_a_process(function, *arguments):
    """What a function gives in a process that is forked for it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.write(write, json.dumps(function(*arguments)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, arguments
    return json.loads(found)


def main():
    """Count, and write the result."""
    sys.path.insert(0, str(ROOT / 'tools/benchmarks'))
    import measuring

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--results', type=Path, help='JSON to put the result into')
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_rows = [Row('plain step', {}), *rows()]
    found = {row.name: in_a_process(leaks_of, row, args.steps) for row in all_rows}
    run = measuring.where(torch.device('cpu')) | {
        'command': f'python -m tests.leaks --steps {args.steps}'
    }
    result = {'run': run, 'steps': args.steps, 'left': found}
    print(json.dumps(result, indent=1))
    if args.results:
        known = json.loads(args.results.read_text()) if args.results.exists() else {}
        args.results.write_text(json.dumps({**known, 'leaks': result}, indent=1) + '\n')
    return sum(left['tensors'] != 0 for left in found.values())


if __name__ == '__main__':
    sys.exit(main())
