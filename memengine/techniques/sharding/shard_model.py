"""Parameters, gradients and optimiser state spread over ranks, on PyTorch's ``fully_shard``.

Each rank holds 1 / N of every tensor. A *unit* (a block of the model) is gathered when its forward
begins and freed when it ends, gathered again for backward, and its gradient is reduced and cut up
right after. What belongs to no unit (embeddings, norms, heads) is the *rest*: it stays gathered for
a whole step, so that losses and other methods of the model may use it outside of ``forward``.

Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (2023);
Rajbhandari et al., ZeRO (2020).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from memengine._torch_private.autograd import after_backward
from memengine._torch_private.distributed import (
    CAN_SHARD_ON_CPU,
    are_ranks_pretended,
    mark_as_root,
)
from memengine._torch_private.modules import own_parameters
from memengine._torch_private.ops import pytree
from memengine.technique import Settings, Technique, setting
from memengine.techniques.modules.fetched_later import FetchedLater
from memengine.techniques.sharding.materializing import materialize
from memengine.techniques.sharding.units import Units, check_tied_weights, choose_units
from memengine.techniques.sharding.without_overlap import one_unit_at_a_time

__all__ = ['ShardedModel', 'shard_model']

FREE_AFTER = ('forward', 'backward', 'step')


def _device_type(model: nn.Module) -> str:
    """Where the parameters are; from the CPU to GPUs if the ranks' group is for them."""
    found = {parameter.device.type for parameter in model.parameters()} - {'cpu', 'meta'}
    return found.pop() if found else 'cuda' if 'nccl' in dist.get_backend_config() else 'cpu'


def _mesh(device: str, replicas: int) -> DeviceMesh:
    """All ranks in one row, or in ``replicas`` rows that each hold the whole model."""
    ranks = dist.get_world_size()
    if not isinstance(replicas, int) or replicas < 1 or ranks % replicas:
        raise ValueError(
            f'replicas must divide the number of ranks, got replicas={replicas} for {ranks} ranks'
        )
    if device == 'cpu' and not CAN_SHARD_ON_CPU:
        raise ValueError(
            f'torch {torch.__version__} shards on GPUs only; install a newer one to shard on CPUs'
        )
    here = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    if device == 'cuda' and here > torch.cuda.device_count():
        raise ValueError(
            f'{here} ranks on this machine, which has {torch.cuda.device_count()} GPU(s); start at '
            'most one process per GPU'
        )
    if replicas == 1:
        return init_device_mesh(device, (ranks,), mesh_dim_names=('shard',))
    shape = (replicas, ranks // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=('replicate', 'shard'))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == 'cpu':
        return torch.device('cpu')
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Cuts along the first dimension that gives all ranks as much; along dimension 0 if none."""

    def place(parameter: nn.Parameter) -> Shard | None:
        even = [axis for axis, size in enumerate(parameter.shape) if size % ranks == 0]
        return Shard(even[0]) if even else None

    return place


@contextmanager
def _without_scalars(module: nn.Module) -> Iterator[None]:
    """Hides parameters without dimensions, which cannot be cut up."""
    before = [(part, dict(own_parameters(part))) for part in module.modules()]
    scalars = {p for _, parameters in before for p in parameters.values() if p is not None}
    scalars = {p for p in scalars if p.ndim == 0}
    for part, parameters in before:
        for key, parameter in parameters.items():
            if parameter in scalars:
                del own_parameters(part)[key]
    try:
        yield
    finally:
        for part, parameters in before:  # in their order, what is sharded by now as it is
            now = dict(own_parameters(part))
            own_parameters(part).clear()
            own_parameters(part).update({key: now.get(key, p) for key, p in parameters.items()})


def shard_model(
    model: nn.Module,
    units: Units = None,
    *,
    device: str | None = None,
    offload: bool = False,
    free_after: str = 'forward',
    reduce_once: bool | None = None,
    prefetch: bool | None = None,
    replicas: int = 1,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> ShardedModel:
    """Spread a model over all ranks, in place; build the optimiser afterwards.

    Args:
        model: On any device, or partly or wholly on ``meta``. Rank 0's values become all ranks'.
        units: What is gathered and freed by itself; by default the blocks, and with ``offload``
            their parts; see :func:`~memengine.techniques.sharding.units.choose_units`.
        device: Type of the device that units are gathered on and computed on. By default where the
            parameters are; from the CPU and ``meta`` they go to the GPUs under NCCL.
        offload: Shards, their gradients and so the optimiser's state live in host memory; a
            unit is copied to the device to be gathered, and the update runs on the CPU.
        free_after: When gathered parameters are freed: after each ``'forward'``; after the next
            ``'backward'``; or after the last slice of the ``'step'``, so that slices do not
            gather them again.
        reduce_once: In a step of several slices, add up whole gradients and reduce them in the
            last one; otherwise every slice reduces, and only shards are held in between. By
            default once, but with ``offload`` in every slice, as whole gradients are on the device.
        prefetch: Whether the next unit is gathered, and the last one's gradient reduced, while one
            computes; by default, unless ``offload``. See
            :mod:`memengine.techniques.sharding.without_overlap`.
        replicas: Copies of the model among the ranks (hybrid sharding): a rank then holds
            replicas / N of it, and only gradients cross between copies. Copies are consecutive
            ranks, so as many as there are machines keeps gathering inside of them.
        param_dtype: What units are gathered and computed in; None for their own type.
        reduce_dtype: What gradients are reduced in; None for ``param_dtype``.
        init_fn: ``init_fn(module)`` gives values to a module's own parameters and buffers that
            were on ``meta``, after ``reset_parameters()`` of modules and ``init_weights()`` of
            models; see :func:`~memengine.techniques.sharding.materializing.materialize`.

    Returns:
        What runs steps of it.

    Raises:
        ValueError: Without a process group; for more ranks than devices; on CPUs with torch 2.6;
            for a setting out of range; for units that part a tied weight; for parameters on
            ``meta`` that nothing gives a value to.

    Cost, for P bytes of parameters on N ranks: P / N of parameters, gradients and each optimiser
    state, the rest, and at most five times the largest unit, or twice with ``prefetch=False``; with
    ``offload`` all but these units and the rest with its gradient is in host memory. Per
    forward and per backward a rank receives P (N - 1) / N, and as much to reduce gradients. With
    ``free_after='step'`` P is gathered once in a step and stays; with ``reduce_once`` whole
    gradients, P, are held between slices. Scalars are held by every rank. Gradients are means over
    the ranks, as DDP's; that all ranks have used the same parameters is compared in 16
    bytes a step. At the start one unit at a time is on the device whole.

    BatchNorm normalises by the rank's samples and its buffers are the rank's own. Hooks on the
    model's parameters see shards.
    """
    if not dist.is_initialized():
        raise ValueError(
            'sharding needs a process group, also on one GPU (to offload); start with torchrun '
            '--nproc_per_node N, and in your own loop call torch.distributed.init_process_group()'
        )
    if free_after not in FREE_AFTER:
        raise ValueError(f'free_after must be one of {FREE_AFTER}, got {free_after!r}')
    mesh = _mesh(device or _device_type(model), replicas)
    on = _device_of(mesh)
    options: dict[str, Any] = dict(
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype),
        shard_placement_fn=_placement(dist.get_world_size() // replicas),
        offload_policy=CPUOffloadPolicy(on.type == 'cuda') if offload else OffloadPolicy(),
    )
    names = choose_units(model, units, fine=offload)
    check_tied_weights(model, names)
    ready: set[Tensor] = set()

    def shard(module: nn.Module, reshard_after_forward: bool) -> None:
        materialize(module, on, init_fn, ready, model)
        with _without_scalars(module):
            fully_shard(module, reshard_after_forward=reshard_after_forward, **options)
        ready.update(module.parameters(), module.buffers())

    for name in sorted(names, key=lambda name: -name.count('.')):
        shard(model.get_submodule(name), free_after == 'forward')
    shard(model, False)
    if not (not offload if prefetch is None else prefetch):
        one_unit_at_a_time(model)
    if reduce_once is None:
        reduce_once = not offload
    scalars = [p for p in model.parameters() if p.ndim == 0]
    return ShardedModel(model, on, names, scalars, free_after, reduce_once)


class ShardedModel:
    """Runs steps of a model that :func:`shard_model` has spread over ranks.

    ::

        sharded = shard_model(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with sharded.gathered():
            for number, piece in enumerate(slices, start=1):
                with sharded.no_sync() if number < len(slices) else nullcontext():
                    loss(sharded(piece)).backward()
        optimizer.step()

    Attributes:
        model: The model; its parameters are DTensors outside of :meth:`gathered`.
        device: Where units are gathered.
        units: Names of the modules that are gathered and freed by themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        units: Sequence[str],
        scalars: Sequence[nn.Parameter],
        free_after: str,
        reduce_once: bool,
    ) -> None:
        self.model, self.device = model, device
        self.units = tuple(units)
        self._scalars = list(scalars)  # frozen ones may be trained later
        self._held = list(model.named_parameters())
        self._free_after = free_after
        self._reduce_once = reduce_once
        self._is_last = True  # whether the next backward is the step's last
        self._is_end_queued = False
        self._told: tuple[FetchedLater, list[str]] | None = None  # of the step before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; its backward reduces gradients unless in :meth:`no_sync`.

        Raises:
            ValueError: In backward (on a GPU without gloo in that of the next step), on all ranks,
                when some of them have not used a parameter that others have: ``fully_shard`` puts
                gradients one behind the other to reduce them, and would add up those of different
                parameters.
        """
        self._is_end_queued = False  # by a backward that was broken off
        outputs = self.model(*args, **kwargs)
        if torch.is_grad_enabled():
            for output in pytree.tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(self._queue_end_of_backward)
        return outputs

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A step, or any use of the model: the rest is gathered; at the end everything is freed.

        Updates of the parameters may be made inside, after the last backward.
        """
        root: Any = self.model
        mark_as_root(root)
        root.unshard()
        try:
            yield
        finally:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of every slice but the last: nothing is reduced (see
        ``reduce_once``), and what ``free_after='step'`` keeps is kept."""
        before = self._is_last
        self._set_last_backward(False)
        try:
            yield
        finally:
            self._set_last_backward(before)

    def _set_last_backward(self, is_last: bool) -> None:
        root: Any = self.model
        self._is_last = is_last
        if self._reduce_once:
            root.set_requires_gradient_sync(is_last)
        root.set_reshard_after_backward(is_last, recurse=self._free_after == 'step')

    def _queue_end_of_backward(self, gradient: Tensor) -> None:
        """Backward has begun: scalars are reduced at its end, as all their gradients are there."""
        if not self._is_end_queued:
            self._is_end_queued = True
            after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._is_end_queued = False
        if not self._is_last:
            return
        self._compare_used_parameters()
        for parameter in self._scalars:
            if parameter.grad is not None:  # the mean of equal numbers is the number itself
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def _compare_used_parameters(self) -> None:
        """Ranks tell each other; on a GPU without gloo it is read a step later, not waited for."""
        if dist.get_world_size() == 1 or are_ranks_pretended():
            return
        used = [name for name, parameter in self._held if parameter.grad is not None]
        mark = zlib.crc32(repr(used).encode()) >> 12  # 20 bits, whose squares add up in 64
        is_on_host = 'gloo' in dist.get_backend_config()
        sums = torch.empty(2, dtype=torch.int64, device='cpu' if is_on_host else self.device)
        sums[0].fill_(mark)
        sums[1].fill_(mark**2)
        dist.all_reduce(sums)
        told = FetchedLater(sums), used
        if is_on_host:
            _refuse_parameters_of_some_ranks(*told)
            return
        earlier, self._told = self._told, told
        if earlier is not None:
            _refuse_parameters_of_some_ranks(*earlier)


def _refuse_parameters_of_some_ranks(sums: FetchedLater, used: list[str]) -> None:
    ranks = dist.get_world_size()
    total, of_squares = sums.tolist()
    if total**2 == ranks * of_squares:
        return
    of_ranks: list[list[str]] = [[] for _ in range(ranks)]
    dist.all_gather_object(of_ranks, used)
    some = {n for names in of_ranks for n in names if any(n not in of for of in of_ranks)}
    name = min(some)
    without = [str(rank) for rank, names in enumerate(of_ranks) if name not in names]
    raise ValueError(
        f'sharding: {name} ({len(some)} parameters in all) has no gradient on rank(s) '
        f'{", ".join(without)}, but has one on others, so that gradients of different '
        'parameters would be added up. Let every rank use it in each step (times 0, say), or '
        "use model_wrapper_cfg.type='MMDistributedDataParallel' with "
        'find_unused_parameters=True'
    )


@dataclass(frozen=True)
class ShardingSettings(Settings):
    """Settings of sharding, as ``model_wrapper_cfg`` takes them."""

    units: Any = setting(None, help='what is gathered by itself; None: the repeated blocks')
    offload: bool = setting(False, help="whether shards and the optimiser's state are on the host")
    free_after: Literal['forward', 'backward', 'step'] = setting(
        'forward', help='when gathered parameters are freed'
    )
    reduce_once: bool | None = setting(
        None, help='whether the slices of a step reduce gradients once; None: unless offload'
    )
    prefetch: bool | None = setting(
        None, help='whether the next unit is gathered ahead; None: unless offload'
    )
    replicas: int = setting(1, help='copies of the model among the ranks', low=1)


_DDP = 'use model_wrapper_cfg.type=MMDistributedDataParallel'
TECHNIQUE = Technique(
    key='sharding',
    title='sharding',
    settings=ShardingSettings,
    switch='model_wrapper_cfg.type=FullyShardedDataParallel|MMFullyShardedDataParallel',
    call='memengine.techniques.shard_model',
    needs_ranks=True,
    conflicts={
        'compile': 'compile makes one graph of the step, which gathering parameters breaks; '
        f'compile the blocks (compile_blocks=True), or {_DDP}',
        'custom_hooks.type=EMAHook': 'EMAHook copies the model, which a sharded one does not '
        f'allow; {_DDP}, or an algorithm that holds its own average, as DINO does',
        'verify_exactness': 'no rank holds the whole model, which the plain step needs; '
        f'{_DDP} for the time of the check',
        'sync_bn.kind=mmcv': 'it does not know of sharding; set sync_bn=torch',
    },
    use_when="parameters, gradients or the optimiser's state do not fit",
    saves="of parameters, gradients and optimiser's state all but 1/N on each rank; with "
    '`offload=True` all of them on the device',
    price='parameters on the wire in each forward and backward',
    page='fsdp.md',
)
