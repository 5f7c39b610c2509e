"""AdamW whose two averages are kept in bfloat16: half the bytes of optimiser state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from memengine._torch_private.ops import foreach_copy_
from memengine.technique import Settings, Technique
from memengine.techniques.sharding.clipping import local_part

_AVERAGES = ('exp_avg', 'exp_avg_sq')
_LOW_BITS = 16  # of float32, which bfloat16 lacks
# Of parameters that are updated together, where starting a kernel takes as long as a small one.
_MOST_NUMBERS = 2**21


class _FlatCopies(NamedTuple):
    """Tensors that lie in one, one behind the other."""

    flat: Tensor
    parts: list[Tensor]

    def like(self, flat: Tensor) -> _FlatCopies:
        """Another one of the same parts."""
        pieces = flat.split([part.numel() for part in self.parts])
        pairs = zip(pieces, self.parts, strict=True)
        return _FlatCopies(
            flat,
            [piece.as_strided(p.shape, p.stride(), piece.storage_offset()) for piece, p in pairs],
        )


def _flattened(tensors: list[Tensor], dtype: torch.dtype) -> _FlatCopies:
    """Tensors in another precision; dense ones lie as they lay."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
    together = _FlatCopies(flat, [torch.empty_like(t, device='meta') for t in tensors]).like(flat)
    foreach_copy_(together.parts, tensors)
    return together


def _noise(numel: int, step: int, device: torch.device) -> Iterator[Tensor]:
    """Uniform integers of 16 bits for each of the two averages, from one draw."""
    generator = torch.Generator(device).manual_seed(step)
    bits = torch.empty(numel, dtype=torch.int32, device=device)
    bits.random_(-(2**31), 2**31, generator=generator)
    lowest = 2**_LOW_BITS - 1
    yield bits & lowest
    yield bits.bitwise_right_shift_(_LOW_BITS).bitwise_and_(lowest)


def stochastically_rounded(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round to one of the two neighbours in bfloat16, the nearer one more often.

    The mean over roundings is the value itself (of float32 numbers exactly).

    Args:
        value: Any floating-point tensor.
        generator: Draws the noise, on the tensor's device.
    """
    noise = torch.randint(
        2**_LOW_BITS, value.shape, generator=generator, dtype=torch.int32, device=value.device
    )
    return _rounded_by(value, noise)


def _rounded_by(value: Tensor, noise: Tensor) -> Tensor:
    """What is rounded; the noise is written over."""
    bits = noise.add_(value.float().view(torch.int32)).bitwise_and_(-(2**_LOW_BITS))
    rounded = bits.view(torch.float32)
    return rounded.masked_fill_(value.isnan(), torch.nan).bfloat16()  # noise may carry out of NaN


class AdamWBf16(torch.optim.AdamW):
    """AdamW with ``exp_avg`` and ``exp_avg_sq`` in bfloat16, rounded stochastically.

    An update takes the averages up to the parameter's precision, is torch's AdamW, and rounds them
    back. To the nearest they would stop: with beta2 = 0.999 the second average changes by 1/1000
    of itself, and neighbours in bfloat16 lie 1/256 to 1/128 apart.

    Args:
        params: Parameters or groups, in float32 or float64.
        lr, betas, eps, weight_decay: As of ``torch.optim.AdamW``.

    Raises:
        TypeError: For parameters in half precision, whose averages torch's AdamW keeps in it.

    Cost: 4 bytes of state per parameter instead of 8. While it runs, some 20 bytes for each number
    of the parameters that it is at: one parameter, or on a GPU several of up to two million numbers
    together, which take some 30 kernels.

    Lossy: forward and gradients are untouched; each average is off by less than 1/128 of itself,
    with mean zero, in every step. The page ``docs/techniques/optimizer_memory.md`` says how far
    that leads from AdamW.

    The noise follows from the step's number alone, and each parameter has the first of it: ranks
    that hold the same parameter round alike, a resumed run goes on exactly, and the random state of
    the training is not touched. DDP, ``fully_shard`` (each rank rounds its shard), autocast and
    gradient scaling are as for AdamW.
    Checkpoints have AdamW's names: either loads the other's, and rounds or widens the averages.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019); Gupta et al., Deep
    Learning with Limited Numerical Precision (2015), for stochastic rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own."""
        super().add_param_group(param_group)
        dtypes = {parameter.dtype for parameter in self.param_groups[-1]['params']}
        for dtype in dtypes - {torch.float32, torch.float64}:
            raise TypeError(
                f'AdamWBf16 is for parameters in float32, got {dtype}; use AdamW, which keeps its '
                "averages in the parameters' precision"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss again, with gradients, and returns it.

        Returns:
            What the closure returned, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for together in self._updated_together(group['params']):
                self._update(together, group)
        return loss

    def _updated_together(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Parameters with a gradient, of one device, dtype and step, few at a time."""
        found: dict[tuple[Any, ...], list[list[Tensor]]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state['step'] = torch.tensor(0.0, dtype=torch.float32, device='cpu')
                for name in _AVERAGES:
                    state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            kind = parameter.device, parameter.dtype, int(state['step'])
            lists = found.setdefault(kind, [[]])
            most = 0 if parameter.device.type == 'cpu' else _MOST_NUMBERS
            if sum(other.numel() for other in lists[-1]) + parameter.numel() > most:
                lists.append([])
            lists[-1].append(parameter)
        return [together for lists in found.values() for together in lists if together]

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        averages = [[local_part(state[name]) for state in states] for name in _AVERAGES]
        exact = [_flattened(tensors, parameters[0].dtype) for tensors in averages]
        adamw(
            [local_part(parameter) for parameter in parameters],
            [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None],
            exact[0].parts,
            exact[1].parts,
            [],
            [state['step'] for state in states],
            amsgrad=False,
            beta1=group['betas'][0],
            beta2=group['betas'][1],
            lr=group['lr'],
            weight_decay=group['weight_decay'],
            eps=group['eps'],
            maximize=False,
        )
        step = int(states[0]['step'])
        noise = _noise(max(part.numel() for part in exact[0].parts), step, parameters[0].device)
        for tensors, together, drawn in zip(averages, exact, noise, strict=True):
            parts = [drawn[: part.numel()] for part in together.parts]
            ours = torch.cat(parts) if len(parts) > 1 else drawn
            rounded = together.like(_rounded_by(together.flat, ours))
            foreach_copy_(tensors, rounded.parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimiser or of AdamW.

        Raises:
            ValueError: When it is that of an AdamW with ``amsgrad`` or ``maximize``.
        """
        for group in state_dict['param_groups']:
            for setting in ('amsgrad', 'maximize'):
                if group.get(setting):
                    raise ValueError(
                        f'the checkpoint is of an optimiser with {setting}=True, which AdamWBf16 '
                        'has not; go on with AdamW'
                    )
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch has cast them to the parameter's precision
            for name in _AVERAGES:
                state[name] = state[name].bfloat16()


TECHNIQUE = Technique(
    key='adamw_bf16',
    title='AdamW with states in bfloat16',
    settings=Settings,
    switch='optim_wrapper.optimizer.type=AdamWBf16',
    call='memengine.techniques.AdamWBf16',
    exactness='rounding',
    use_when="the optimiser's state does not fit",
    saves="half of the optimiser's state",
    price='rounding its averages, without bias',
    page='optimizer_memory.md',
)
