"""What looking for NaN and infinity costs in a step in which there is none.

One model takes steps with the guard and without it in turn, in one process, once without clipping
and once with. Printed are the medians of whole steps, and of the ratios of neighbouring ones, in
time by the clock and in time of the CPU, which says more on a machine that others use; and what the
guard takes by itself.

    python tools/benchmarks/nonfinite_guard.py --steps 40
    python tools/benchmarks/nonfinite_guard.py --model resnet18   # with buffers: BatchNorm
"""

import argparse
import os
import platform
import statistics
import time

import torch
from mmengine.logging import MessageHub

from memengine.engine.faults.capture import StepStart
from memengine.engine.faults.guard import StepGuard
from memengine.engine.optim import OptimWrapper
from memengine.engine.step import run_step
from memengine.models import Classifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='vit_tiny_patch16_224', help="one of timm's")
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--steps', type=int, default=40, help='pairs of steps')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--device', default='cpu')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    MessageHub.get_instance('nonfinite_guard')

    model = Classifier(dict(type='TimmBackbone', model_name=args.model), num_classes=1000)
    model.to(args.device).train()
    images = torch.randn(args.batch_size, 3, 224, 224)
    batch = dict(inputs=images, data_samples=dict(label=torch.arange(args.batch_size)))
    print(f'{args.model}, batch {args.batch_size}, {args.device}')
    for clip_grad in (None, dict(max_norm=1.0)):
        wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-4), clip_grad=clip_grad)
        seconds = _measure(model, batch, wrapper, args.steps)
        print('clipped' if clip_grad else 'not clipped')
        for clock, steps in seconds.items():
            pairs = zip(steps['guarded'], steps['bare'], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            medians = ', '.join(
                f'{name} {statistics.median(each) * 1e3:.1f} ms' for name, each in steps.items()
            )
            print(f'  by the {clock:6s} {medians}; ratio {ratio:.4f}')
        alone = statistics.median(_alone(model, batch, wrapper))
        print(f'  by itself    {alone / statistics.median(seconds["clock"]["bare"]):.2%} of a step')
    busy = f'load {os.getloadavg()[0]:.1f}' if hasattr(os, 'getloadavg') else 'load unknown'
    print(f'torch {torch.__version__}, {platform.machine()}, {args.threads} thread(s), {busy}')


def _measure(model, batch, wrapper, pairs):
    """Seconds of each step, by the clock and of the CPU, with the guard and without."""
    start, guard = StepStart(model), StepGuard()

    def guarded() -> None:
        wrapper.guard = guard
        start.keep()
        run_step(model, batch, wrapper)

    def bare() -> None:
        wrapper.guard = None
        run_step(model, batch, wrapper)['loss'].item()  # a loop that looks at its loss

    clocks = dict(clock=time.perf_counter, CPU=time.process_time)
    seconds = {clock: {'guarded': [], 'bare': []} for clock in clocks}
    for step in range(pairs + 2):
        order = [('guarded', guarded), ('bare', bare)]
        for name, carry_out in order if step % 2 else order[::-1]:
            begun = {clock: read() for clock, read in clocks.items()}
            carry_out()
            if step >= 2:
                for clock, read in clocks.items():
                    seconds[clock][name].append(read() - begun[clock])
    return seconds


def _alone(model, batch, wrapper, times=20):
    """Seconds of what the guard adds to a step; norms are there where gradients are clipped."""
    start, wrapper.guard = StepStart(model), StepGuard()
    model(**batch, mode='loss')['loss'].backward()
    seconds = []
    for _ in range(times):
        norms = wrapper._grad_norms()
        begun = time.perf_counter()
        start.keep()
        wrapper._passes(norms if wrapper.clip_grad_kwargs else wrapper._grad_norms())
        seconds.append(time.perf_counter() - begun)
    wrapper.zero_grad()
    return seconds


if __name__ == '__main__':
    main()
