"""What checkpoints cost training: blocks of steps with a save in them beside blocks without.

In one process, in turn: blocks of the same steps, each kind of save at the start of its block,
then none. Printed are, of each kind, the median of what a block with it takes longer than its
neighbour without, for how much of that training stood still, and from which interval on it is
less than 5 % of training.

    python tools/benchmarks/checkpoint_cost.py --model vit_tiny_patch16_224 --steps 40
"""

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import timm
import torch
from torch.nn.functional import cross_entropy

from memengine.engine.checkpoint.saving import CheckpointWriter, write_file
from memengine.engine.checkpoint.sharded_saving import sharded_write
from memengine.engine.checkpoint.state import gather_state

KINDS = {  # whether in shards, whether in the background
    '.pth': (False, False),
    '.pth, asynchronous': (False, True),
    '.dcp': (True, False),
    '.dcp, asynchronous': (True, True),
}


class Training:
    """Steps of a classifier on noise, and checkpoints of all that a run would save."""

    def __init__(self, model: str, batch_size: int, folder: Path) -> None:
        self.model = timm.create_model(model, num_classes=100)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        size = self.model.default_cfg['input_size']
        self.images, self.labels = torch.randn(batch_size, *size), torch.arange(batch_size) % 100
        self.writer, self.folder = CheckpointWriter(), folder

    def step(self) -> None:
        cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, sharded: bool, asynchronous: bool) -> None:
        state = dict(state_dict=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        if sharded:
            write = sharded_write(self.folder / 'a.dcp', state, asynchronous)
        else:
            whole = gather_state(state, copies=asynchronous)

            def write() -> None:
                write_file(self.folder / 'a.pth', whole)

        self.writer.start(write, asynchronous)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='vit_tiny_patch16_224', help='of timm')
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--steps', type=int, default=40, help='steps of each block')
    parser.add_argument('--rounds', type=int, default=9, help='blocks of each kind')
    parser.add_argument('--threads', type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(args.model, args.batch_size, Path(folder))
        training.step()
        longer: dict[str, list[float]] = {kind: [] for kind in KINDS}
        stood_still: dict[str, list[float]] = {kind: [] for kind in KINDS}
        without: list[float] = []
        for _ in range(args.rounds):
            for kind, (sharded, asynchronous) in KINDS.items():
                begin = time.perf_counter()
                training.save(sharded, asynchronous)
                stood_still[kind].append(time.perf_counter() - begin)
                for _ in range(args.steps):
                    training.step()
                training.writer.wait()
                saved = time.perf_counter() - begin
                begin = time.perf_counter()
                for _ in range(args.steps):
                    training.step()
                without.append(time.perf_counter() - begin)
                longer[kind].append(saved - without[-1])
        path = Path(folder) / 'a.pth'
        print(f'{args.model}: a checkpoint of {path.stat().st_size / 2**20:.0f} MiB')
    step_s = statistics.median(without) / args.steps
    print(f'a step of {args.batch_size} takes {step_s * 1e3:.0f} ms')
    for kind in KINDS:
        cost_s, still_s = statistics.median(longer[kind]), statistics.median(stood_still[kind])
        print(
            f'{kind:18s} costs {cost_s * 1e3:6.0f} ms, for {still_s * 1e3:6.0f} ms of it training '
            f'stands still; below 5 % with one in {max(cost_s, 0) / 0.05 / step_s:.0f} steps'
        )
    print(f'torch {torch.__version__}, {platform.machine()}, {args.threads} thread(s)')


if __name__ == '__main__':
    main()
