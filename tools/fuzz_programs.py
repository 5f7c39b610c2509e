# ruff: noqa: E501 (tables of code)
"""Random programs of operations: blocks of a few lines, each of which is code as a person writes it.

Values are images [B, 8, 4, 4], sequences [B, 16, 8] or vectors [B, 8]; a line makes one of others,
or changes one in place.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

# ``a`` and ``b`` stand for values, ``m`` for a module or parameter, made by what follows it.
_Operation = tuple[str, str, str]  # code, the module, the kind that it gives
IMAGE, SEQUENCE, VECTOR = 'image', 'sequence', 'vector'
_IN_PLACE = ''  # gives nothing

_OF_ANY = """gelu(a) | relu(a) | silu(a) | tanh(a) | sigmoid(a) | softplus(a) | elu(a) | mish(a)
softmax(a, -1) | dropout(a, 0.3, self.training) | normalize(a, dim=1) | hardswish(a)
leaky_relu(a) | layer_norm(a, a.shape[1:]) | gelu(a, approximate='tanh') | alpha_dropout(a, 0.2)"""
_WRITTEN = """a + b | a * b | a - 0.5 * b | a * 0.5 | a.clone() | a.contiguous() | a.flip(1) | a.detach() + b
a.roll(1, 1) | a.float().to(a.dtype) | torch.cat([a[:, 4:], b[:, :4]], 1) | a.pow(2) | a.abs()
torch.stack([a, b]).mean(0) | torch.where(a > 0, a, b) | torch.addcmul(a, a, b) | a.view_as(b)
torch.lerp(a, b, 0.3) | a * torch.rand_like(a) | a - a.mean(1, keepdim=True) | torch.maximum(a, b)
a.masked_fill(b > 1, 0.0) | a / (1 + b.abs()) | a.cumsum(1) * 0.2 | a.sort(1).values | a.chunk(2, 1)[0].repeat_interleave(2, 1)
a[:, torch.arange(a.shape[1] - 1, -1, -1)] | a.clamp(-1, 1) | a.expand_as(a) | a[torch.arange(len(a))]
a.split(4, 1)[0].repeat_interleave(2, 1) | a.unflatten(1, (2, -1)).flatten(1, 2) | a.mT.mT | a.to(a)
torch.utils.checkpoint.checkpoint(torch.tanh, a, use_reentrant=False)"""
_CHANGES = """a.add_(b) | a.mul_(0.5) | a.relu_() | a[:, ::2].mul_(0.5) | a.add_(b.detach()) | a.tanh_()
a[:, 1] = 0.0 | F.dropout(a, 0.3, self.training, inplace=True) | F.silu(a, inplace=True) | a += b
F.leaky_relu(a, inplace=True) | a[:, 0].copy_(b[:, 1]) | a.clamp_(-1, 1) | a *= b | a.sub_(1).abs_()"""
_MODULES = {
    IMAGE: """m(a) : nn.Conv2d(8, 8, 3, padding=1) | m(a) : nn.Conv2d(8, 8, 1, bias=False)
m(a) : nn.Conv2d(8, 8, 3, padding=1, groups=8) | m(a) : nn.BatchNorm2d(8) | m(a) : nn.GroupNorm(2, 8)
m(a) : nn.ConvTranspose2d(8, 8, 3, padding=1) | m(a) : nn.InstanceNorm2d(8) | m(a) : nn.Dropout2d(0.3)
m(a) : nn.ReLU(inplace=True) | m(a) : nn.MaxPool2d(3, 1, 1) | m(a) : nn.AvgPool2d(3, 1, 1)
m(a) : nn.SiLU(inplace=True) | m(a) : nn.BatchNorm2d(8, affine=False) | m(a) : nn.Hardswish()
m(a) : nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
m(a) : nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
m(a) : nn.BatchNorm2d(8, momentum=None) | m(a) : nn.PReLU(8) | m(a) : nn.Softmax2d()
m(a) : nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)) | m(a) : nn.Dropout(0.3)
F.conv2d(a, m) : nn.Parameter(torch.randn(8, 8, 1, 1) / 3) | a * m : nn.Parameter(torch.ones(8, 1, 1))
F.interpolate(m(a), scale_factor=2) : nn.AvgPool2d(2)""",
    SEQUENCE: """m(a) : nn.Linear(8, 8) | m(a) : nn.Linear(8, 8, bias=False) | m(a) : nn.LayerNorm(8)
m(a) : nn.RMSNorm(8) | m(a, a, a)[0] : nn.MultiheadAttention(8, 2, batch_first=True)
m(a, b, b, need_weights=False)[0] : nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
m(a) : nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) | m(a)[0] : nn.GRU(8, 8, batch_first=True)
m(a) : nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
m(a) : nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(inplace=True)) | m(a) : nn.Dropout(0.3)
m(a).chunk(2, -1)[0] * a : nn.Linear(8, 16) | a * m : nn.Parameter(torch.ones(8))
F.scaled_dot_product_attention(m(a), b, a) : nn.Linear(8, 8) | F.linear(a, m) : nn.Parameter(torch.eye(8))
torch.einsum('bnc,dc->bnd', a, m) : nn.Parameter(torch.eye(8)) | a + m(a.argmax(-1)) : nn.Embedding(8, 8)
F.layer_norm(a, (8,), m) : nn.Parameter(torch.ones(8)) | m(a) : nn.LayerNorm(8, bias=False)
(m(a) @ b.mT).softmax(-1) @ a : nn.Linear(8, 8) | m(a.mT).mT : nn.Conv1d(8, 8, 3, padding=1)
m(a) : nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) | m(a) : nn.Tanh()""",
    VECTOR: """m(a) : nn.Linear(8, 8) | m(a) : nn.BatchNorm1d(8) | m(a) : nn.LayerNorm(8)
m(a, b) : nn.Bilinear(8, 8, 8) | F.linear(a, m) : nn.Parameter(torch.eye(8)) | m(a) : nn.ReLU()
m(a) : nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8))""",
}
_TURNS = {  # from one kind to another
    IMAGE: {SEQUENCE: 'a.flatten(2).mT', VECTOR: 'a.mean((2, 3))'},
    SEQUENCE: {IMAGE: 'a.mT.unflatten(2, (4, 4))', VECTOR: 'a[:, 0]'},
    VECTOR: {
        IMAGE: 'a[:, :, None, None].expand(-1, -1, 4, 4)',
        SEQUENCE: 'a[:, None] + a.new_zeros(16, 1)',
    },
}


def _listed(text: str) -> list[str]:
    return [entry.strip() for line in text.splitlines() for entry in line.split(' | ')]


def _operations(kind: str) -> list[_Operation]:
    with_modules = [tuple(entry.split(' : ')) for entry in _listed(_MODULES[kind])]
    plain = [f'F.{entry}' for entry in _listed(_OF_ANY)] + _listed(_WRITTEN)
    return [
        *[(code, module, kind) for code, module in with_modules] * 2,
        *[(code, '', kind) for code in plain],
        *[(code, '', _IN_PLACE) for code in _listed(_CHANGES)],
        *[(code, '', to) for to, code in _TURNS[kind].items()],
    ]


OPERATIONS = {kind: _operations(kind) for kind in (IMAGE, SEQUENCE, VECTOR)}


@dataclass(frozen=True)
class Line:
    """A line of a block's ``forward``.

    Attributes:
        result: The name of what it makes; empty for a change in place.
        code: Its expression or statement, with names of values and modules.
        reads: The values that it reads; what it makes is replaced by the first if it is dropped.
        keeps_kind: Whether its result is of the first one's kind, so that it can be dropped.
        module: The name of its module or parameter.
        made_by: What makes that.
    """

    result: str
    code: str
    reads: tuple[str, ...]
    keeps_kind: bool
    module: str = ''
    made_by: str = ''

    def text(self) -> str:
        return f'{self.result} = {self.code}' if self.result else self.code


@dataclass(frozen=True)
class Program:
    """A model: blocks, and the order in which they are called.

    Attributes:
        blocks: The lines of each; the last line's value is an image.
        calls: Lines of the model's ``forward``, on ``x``.
    """

    blocks: tuple[tuple[Line, ...], ...]
    calls: tuple[str, ...]

    def text(self) -> str:
        """The classes, of which ``Model`` is the model."""
        used = [n for n in range(len(self.blocks)) if f'self.block{n}(' in ' '.join(self.calls)]
        parts = [_class(f'Block{n}', 'x', *_body(self.blocks[n])) for n in used]
        made = [f'self.block{n} = Block{n}()' for n in used]
        made.append('self.head = nn.Linear(8, 5)')
        calls = [*self.calls, 'return self.head(x.mean((2, 3)))']
        return '\n\n'.join([*parts, _class('Model', 'x', made, calls)])

    def smaller(self) -> Iterator[Program]:
        """The same with a call or a line less."""
        for number in range(len(self.calls)):
            yield replace(self, calls=self.calls[:number] + self.calls[number + 1 :])
        for block, lines in enumerate(self.blocks):
            for number in reversed(range(len(lines))):
                if (shorter := _without(lines, number)) is not None:
                    blocks = (*self.blocks[:block], shorter, *self.blocks[block + 1 :])
                    yield replace(self, blocks=blocks)


def _without(lines: tuple[Line, ...], number: int) -> tuple[Line, ...] | None:
    line, after = lines[number], lines[number + 1 :]
    if line.result and not line.keeps_kind:
        is_used = not after or any(line.result in later.reads for later in after)
        return None if is_used else lines[:number] + after
    if line.result:
        pattern, by = re.compile(rf'\b{line.result}\b'), line.reads[0]
        after = tuple(
            replace(
                later,
                code=pattern.sub(by, later.code),
                reads=tuple(by if name == line.result else name for name in later.reads),
            )
            for later in after
        )
    return lines[:number] + after


def _body(lines: tuple[Line, ...]) -> tuple[list[str], list[str]]:
    made = {line.module: f'self.{line.module} = {line.made_by}' for line in lines if line.module}
    results = ['x', *(line.result for line in lines if line.result)]
    return list(made.values()), [*(line.text() for line in lines), f'return {results[-1]}']


def _class(name: str, argument: str, made: list[str], lines: list[str]) -> str:
    indented = '\n'.join(f'        {line}' for line in ['super().__init__()', *made])
    body = '\n'.join(f'        {line}' for line in lines)
    return (
        f'class {name}(nn.Module):\n    def __init__(self):\n{indented}\n\n'
        f'    def forward(self, {argument}):\n{body}\n'
    )


# ------------------------------------------------------------------ drawing


def draw_program(draw: random.Random) -> Program:
    """Up to four blocks of up to eight lines; some are called twice, some beside each other."""
    blocks = tuple(_draw_block(draw) for _ in range(draw.randint(1, 4)))
    calls = []
    for number in [*range(len(blocks)), *draw.choices(range(len(blocks)), k=draw.randint(0, 2))]:
        block = f'self.block{number}'
        forms = (f'{block}(x)', f'x + {block}(x)', f'{block}(x * 0.5) + {block}(x)')
        calls.append(f'x = {draw.choices(forms, (5, 3, 1))[0]}')
    return Program(blocks, tuple(calls))


def _draw_block(draw: random.Random) -> tuple[Line, ...]:
    kinds = {'x': IMAGE}
    lines: list[Line] = []
    for number in range(draw.randint(1, 8)):
        latest = list(kinds)[-3:]
        a = draw.choice([*latest, *latest[-1:] * 2])
        _add(draw, lines, kinds, a, draw.choice(OPERATIONS[kinds[a]]), number)
    last = list(kinds)[-1]
    if kinds[last] != IMAGE:
        _add(draw, lines, kinds, last, (_TURNS[kinds[last]][IMAGE], '', IMAGE), len(lines))
    return tuple(lines)


def _add(
    draw: random.Random,
    lines: list[Line],
    kinds: dict[str, str],
    a: str,
    operation: _Operation,
    number: int,
) -> None:
    code, made_by, kind = operation
    b = draw.choice([name for name in kinds if kinds[name] == kinds[a]])
    module = f'part{number}' if made_by else ''
    shared = [line.module for line in lines if line.made_by == made_by and made_by]
    if shared and draw.random() < 0.5:
        module = shared[0]
    names = {'a': a, 'b': b, 'm': f'self.{module}'}
    code = re.sub(r"(?<![\w.'])[abm](?![\w'=])", lambda match: names[match[0]], code)
    result = f'v{number}' if kind else ''
    lines.append(Line(result, code, (a, b), kind == kinds[a], module, made_by))
    if kind:
        kinds[result] = kind
