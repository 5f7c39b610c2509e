"""What ``run_step`` costs beside a hand-written loop of the same model.

Two copies of the quick start's model take steps in turn, in one process: one through
``run_step``, one through the lines that a training script would have. Printed are both medians
and the median of the ratios of neighbouring steps.

    python tools/benchmarks/run_step_overhead.py --steps 200
"""

import argparse
import copy
import platform
import statistics
import time
from pathlib import Path

import torch
from mmengine.config import Config

import memengine.models  # noqa: F401  (registers the models)
from memengine.engine.optim import OptimWrapper
from memengine.engine.step import run_step
from memengine.registry import MODELS

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=200, help='steps of each loop')
    parser.add_argument('--threads', type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    cfg = Config.fromfile(ROOT / 'configs' / 'dino_vit.py')
    ours = MODELS.build(cfg.model)
    plain = copy.deepcopy(ours)
    batch = dict(inputs=[torch.randn(64, 1, 16, 16) for _ in range(2)], data_samples=None)
    adamw = dict(lr=1e-3, weight_decay=0.04)
    wrapper = OptimWrapper(
        torch.optim.AdamW(ours.student.parameters(), **adamw), clip_grad=dict(max_norm=3.0)
    )
    optimizer = torch.optim.AdamW(plain.student.parameters(), **adamw)

    def hand_written() -> None:
        inputs = [x.to('cpu', non_blocking=True) for x in batch['inputs']]
        loss = plain(inputs, mode='loss')['loss']
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.student.parameters(), 3.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {'run_step': [], 'by hand': []}
    for step in range(args.steps + 5):
        pair = [('run_step', lambda: run_step(ours, batch, wrapper)), ('by hand', hand_written)]
        for name, carry_out in pair if step % 2 else pair[::-1]:
            start = time.perf_counter()
            carry_out()
            if step >= 5:
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds['run_step'], seconds['by hand'], strict=True)]
    for name, values in seconds.items():
        print(f'{name:10s} median {statistics.median(values) * 1e3:8.2f} ms')
    print(f'ratio      median {statistics.median(ratios):8.4f}')
    print(f'torch {torch.__version__}, {platform.machine()}, {args.threads} thread(s)')


if __name__ == '__main__':
    main()
