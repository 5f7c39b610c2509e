"""What the fuzz tries: a model, of a random program or of the zoo, and a random way of training it.

Each case is a script, which is also its reproduction: it ends with an error where the way of
training is wrong.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fuzz_programs import Program, draw_program
from same_training import ROOT
from zoo_models import zoo

HEAD = f"""import sys

sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tools')!r}]
"""
END = """
print(result)
assert not result.startswith('wrong'), result
"""
_IMPORTS = """
import torch
from torch import nn
from torch.nn import functional as F

from memengine.techniques import *
from same_training import *
from zoo_models import zoo

torch.manual_seed(0)
torch.set_num_threads(1)
"""


def is_installed(library: str) -> bool:
    """Whether a library can be imported."""
    return importlib.util.find_spec(library) is not None


class Case(Protocol):
    """Something to try."""

    @property
    def kind(self) -> str:
        """What is counted together."""
        ...

    def script(self) -> str:
        """Sets ``result`` to what becomes of it, as ``same_training.outcome`` says it."""
        ...

    def smaller(self) -> Iterator[Case]:
        """The same with less in it."""
        ...


@dataclass(frozen=True)
class Techniques:
    """A way of training, as code.

    Attributes:
        apply: Calls with ``model``.
        step: A function of ``same_training``.
        flags: Of its ``Way``, which are true.
    """

    apply: tuple[str, ...]
    step: str
    flags: tuple[str, ...]

    def text(self) -> str:
        calls = ''.join(f'        lambda model: {call},\n' for call in self.apply)
        flags = ''.join(f'    {flag}=True,\n' for flag in self.flags)
        return f'way = Way(\n    [\n{calls}    ],\n    {self.step},\n{flags})\n'

    def smaller(self) -> Iterator[Techniques]:
        for number in range(len(self.apply)):
            yield replace(self, apply=self.apply[:number] + self.apply[number + 1 :])
        if self.step != 'plain_step':
            yield replace(self, step='plain_step')
        for number in range(len(self.flags)):
            if self.flags[number] == 'is_coupled':
                yield replace(self, flags=self.flags[:number] + self.flags[number + 1 :])


@dataclass(frozen=True)
class OfProgram:
    """A random program and a way of training it."""

    program: Program
    techniques: Techniques
    kind = 'programs'

    def script(self) -> str:
        made = (
            'model = shaken(Model())\n'
            'batches = [torch.randn(4, 8, 4, 4, dtype=torch.float64) for _ in range(STEPS)]\n'
        )
        parts = [HEAD + _IMPORTS, self.program.text(), made + self.techniques.text() + _RESULT]
        return '\n\n'.join(parts)

    def smaller(self) -> Iterator[OfProgram]:
        for techniques in self.techniques.smaller():
            yield replace(self, techniques=techniques)
        for program in self.program.smaller():
            yield replace(self, program=program)


@dataclass(frozen=True)
class OfZoo:
    """A model of the zoo and a way of training it."""

    name: str
    techniques: Techniques
    kind = 'zoo'

    def script(self) -> str:
        made = (
            f'entry = zoo()[{self.name!r}]\n'
            'model = shaken(entry.make())\n'
            'batches = [entry.batch() for _ in range(STEPS)]\n'
        )
        return f'{HEAD}{_IMPORTS}{made}{self.techniques.text()}{_RESULT}'

    def smaller(self) -> Iterator[OfZoo]:
        for techniques in self.techniques.smaller():
            yield replace(self, techniques=techniques)


_RESULT = f'result = outcome(PlainTraining(model, batches), way){END}'


# ------------------------------------------------------------------ drawing


def draw_program_case(draw: random.Random) -> OfProgram:
    """A program, of which blocks or parts are chosen by name."""
    program = draw_program(draw)
    blocks = [f'block{number}' for number in range(len(program.blocks))]
    chosen = ("'block*'", repr([draw.choice(blocks)]))
    return OfProgram(program, draw_techniques(draw, chosen))


def draw_zoo_case(draw: random.Random) -> OfZoo:
    """One of the models that take about a second."""
    names = [
        name for name in zoo() if name.startswith(('transformers', 'open_clip')) or _is_small(name)
    ]
    return OfZoo(draw.choice(names), draw_techniques(draw, ("'blocks'",)))


def _is_small(name: str) -> bool:
    """Whether a name promises a model that is."""
    return name.endswith(('0', 'tiny', 'xxs', 'nano', 'atto', 'femto', '_e', '10t', '14t', '_t8'))


def draw_techniques(draw: random.Random, modules: Sequence[str]) -> Techniques:
    """Some techniques in the order in which a run applies them, and a step."""
    some = modules[draw.randrange(len(modules))]
    if draw.random() < 0.15:
        return Techniques((_lossy_call(draw),), 'plain_step', ('is_lossy',))
    calls = {
        'efficient_conv_bn_eval(model, strict=False)': 0.4,
        f'recompute_activations(model{_where(draw, some)})': 0.5,
        f'checkpoint_activations(model, {some}{_of_checkpoints(draw)})': 0.5,
        f'offload_activations(model, {_of_offload(draw)})': 0.3,
    }
    apply = tuple(call for call, share in calls.items() if draw.random() < share)
    steps = dict(
        plain_step=4, gradient_cache_step=2, accumulated_step=1, step_with_updates_inside=1
    )
    step = draw.choices(list(steps), list(steps.values()))[0]
    in_slices = step in ('gradient_cache_step', 'accumulated_step')
    flags = {
        'is_coupled': step == 'gradient_cache_step'
        or (step != 'accumulated_step' and draw.random() < 0.3),
        'is_frozen': in_slices or draw.random() < 0.5,
    }
    return Techniques(apply, step, tuple(flag for flag, is_true in flags.items() if is_true))


def _where(draw: random.Random, modules: str) -> str:
    return draw.choice(['', '', f', modules={modules}', f', exclude={modules}'])


def _of_checkpoints(draw: random.Random) -> str:
    ops = ['matmuls', 'attention', 'aten.gelu', 'aten.convolution', 'aten.native_layer_norm']
    ops += ['aten.silu', 'aten.mul', 'aten.add', 'aten.relu', 'aten.native_dropout']
    return draw.choice(
        [
            '',
            ', every=2',
            f', budget={draw.choice([0, 0.2, 0.4, 0.6, 0.8, 1])}',
            f', keep={draw.sample(ops, draw.randint(1, 4))}',
            f', keep={draw.sample(ops, draw.randint(1, 4))}',
        ]
    )


def _of_offload(draw: random.Random) -> str:
    store = draw.choice(['host', 'host', 'disk'])
    return f"'{store}', min_bytes={draw.choice([0, 1024])}, look_ahead={draw.randint(0, 3)}"


def _lossy_call(draw: random.Random) -> str:
    if draw.random() < 0.5:
        strategy = draw.choice(['mink', 'block_mink', 'random'])
        return f"drop_activations(model, '{strategy}', {draw.choice([0, 0.5, 0.9])})"
    how = draw.choice(['bits=8', 'bits=4', 'bits=2', 'bits=1', "bits=8, ranges='running'"])
    return f'quantize_activations(model, {how}, min_numel=0, group_size={draw.choice([8, 256])})'
