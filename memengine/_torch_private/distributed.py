"""What torch keeps private of FSDP2, process groups and sharded checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily

CAN_SHARD_ON_CPU = hasattr(torch.cpu.Stream, 'record_event')
"""Whether ``fully_shard`` runs on CPUs: it records events on streams, as those of 2.6 cannot."""

FORGETS_SHARDED_STEPS = hasattr(FSDPModule, 'reset_iter_state')
"""Whether ``fully_shard`` can begin anew after a step that was broken off, as since 2.14."""

METADATA_RECORDS = frozenset(
    (
        *(
            ('torch.distributed.checkpoint.metadata', name)
            for name in (
                'ChunkStorageMetadata',
                'Metadata',
                'MetadataIndex',
                'StorageMeta',
                'TensorProperties',
                'TensorStorageMetadata',
                '_MEM_FORMAT_ENCODING',
            )
        ),
        ('torch.distributed.checkpoint.filesystem', '_StorageInfo'),
        ('torch', 'Size'),
        ('torch.serialization', '_get_layout'),
        ('pathlib', 'PosixPath'),
        ('pathlib', 'WindowsPath'),
        ('pathlib._local', 'PosixPath'),  # Python 3.13
    )
)
"""What ``.metadata`` of a sharded checkpoint of tensors names in its pickle, besides dtypes."""


def default_store() -> dist.Store:
    """The store through which the ranks of the job have found each other."""
    return dist.distributed_c10d._get_default_store()


def numbers_reduced(model: DistributedDataParallel) -> tuple[int, int]:
    """How many parameters are trained now, and of how many DDP reduces gradients.

    These are those that were trained when it was made. It holds all of them in a list, which takes
    a fraction of the time to look through the modules, in each step.
    """
    trained = sum(parameter.requires_grad for parameter in model._module_parameters)
    return trained, model._get_ddp_logging_data()['num_parameter_tensors']


@contextmanager
def pretended_ranks(number: int) -> Iterator[None]:
    """A process group of which this process is the first rank, and no other exists.

    Collectives send nothing and give what was there. It is torch's for tests, which its own
    estimates of memory use, too.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def are_ranks_pretended() -> bool:
    """Whether the process group is one of :func:`pretended_ranks`."""
    return dist.is_initialized() and dist.get_backend() == 'fake'


def process_group_of(group: Any) -> dist.ProcessGroup:
    """The process group that an operator was given: itself, boxed, or by its name."""
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def mark_as_root(model: Any) -> None:
    """Tell a model that ``fully_shard`` was applied to that it is the outermost.

    It would learn so in its first forward; a unit that is called before takes itself for it.
    """
    model._get_fsdp_state()._lazy_init()


def gather_on_compute_stream(model: Any) -> None:
    """Have ``fully_shard`` gather on the stream that computes, so that it can free what it gathered
    from at once."""
    model._set_unshard_async_op(True)


def _states_of(module: nn.Module) -> list[Any]:
    return [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]


def _units_of(module: nn.Module) -> list[Any]:
    """What ``fully_shard`` gathers at a time: of a part none without parameters, several where its
    parameters are spread over several meshes, as newer versions allow."""
    units: list[Any] = []
    for state in _states_of(module):
        units += getattr(state, '_fsdp_param_groups', None) or [state._fsdp_param_group]
    return [unit for unit in units if unit is not None]


def gather_unseen_by(modes: tuple[type, ...], module: nn.Module) -> None:
    """Let units of a module be gathered and freed out of sight of dispatch modes.

    That takes operators within the module's forward, more or fewer of them by what is gathered
    already; and the gathered weights are no outputs of operators, whose memory stays.
    """
    of_units = ('pre_forward', 'unshard', 'wait_for_unshard', 'post_forward')
    calls = [(unit, name) for unit in _units_of(module) for name in of_units]
    calls += [(state, '_root_pre_forward') for state in _states_of(module)]
    for held, name in calls:
        if name not in vars(held):
            setattr(held, name, _unseen_by(modes, getattr(held, name)))


def _unseen_by(modes: tuple[type, ...], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            while any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack()):
                stack.enter_context(_pop_mode_temporarily())
            return method(*args, **kwargs)

    return run


class _AccumulatedGradient:
    """What torch 2.14 holds beside a parameter, in the type that ranks reduce gradients in."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def grad(self) -> Any:
        return self._held.unsharded_accumulated_grad

    @grad.setter
    def grad(self, value: Any) -> None:
        self._held.unsharded_accumulated_grad = value


def gradient_holders(module: nn.Module) -> list[Any]:
    """What has a ``grad`` between the backwards of a module that ``fully_shard`` was applied to.

    That are shards, whole parameters whose gradient waits until the ranks reduce it, whichever of
    both the module shows at present, and what is not sharded.
    """
    shards, wholes, others = [], [], []
    for unit in _units_of(module):
        for held in unit.fsdp_params:
            shards.append(held.sharded_param)
            if '_unsharded_param' in vars(held):  # since it was first gathered
                wholes.append(held._unsharded_param)
            if 'unsharded_accumulated_grad' in vars(held):
                others.append(_AccumulatedGradient(held))
    known = {id(parameter) for parameter in shards + wholes}
    return [*shards, *wholes, *others, *(p for p in module.parameters() if id(p) not in known)]


def forget_reduction(module: Any) -> None:
    """Let a DistributedDataParallel begin anew after a step that was broken off.

    It waits for a backward, and where its buckets were being made again, it has but a part of them.
    Whatever its group was given before has ended when this returns. All ranks of the group call it.
    """
    dist.barrier(module.process_group)  # else what is still reduced is written into the next step
    module.reducer = module.logger = None  # the memory of its buckets, before others are made
    parameters, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)
    if module.static_graph:
        module.reducer._set_static_graph()
        module.logger._set_static_graph()


_Around: TypeAlias = Callable[[], AbstractContextManager[None]]
_around: tuple[int, _Around] | None = None  # and the thread that entered it
_POINT_TO_POINT = {'send', 'recv_', 'recv_any_source_', 'check_for_nan'}


@contextmanager
def around_collectives(context: _Around) -> Iterator[None]:
    """Enter a context around each collective that this thread begins, and its backward passes do.

    Whoever begins it: a loss, DDP's reducer, SyncBatchNorm. They all go through operators of torch,
    of which the ``c10d`` ones are given a kernel before the backends' own, once for all. A mode
    would see them as well, and every other operator.
    """
    global _around
    _listen_to_collectives()
    outer, _around = _around, (threading.get_ident(), context)
    try:
        yield
    finally:
        _around = outer


@cache
def _listen_to_collectives() -> torch.library.Library:
    library = torch.library.Library('c10d', 'IMPL')
    backends = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, name = qualified.split('::')
        if namespace == 'c10d' and name not in _POINT_TO_POINT:
            kernel = _kernel(getattr(torch.ops.c10d, name).default, backends)
            library.impl(name, kernel, 'BackendSelect', with_keyset=True)
    return library


def _kernel(operator: Any, backends: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # Threads of autograd are nobody's own; those of checkpoints and loaders are no part of it.
        in_backward = torch._C._current_graph_task_id() != -1
        if _around is None or not (in_backward or threading.get_ident() == _around[0]):
            return operator.redispatch(keys & backends, *args, **kwargs)
        with _around[1]():
            return operator.redispatch(keys & backends, *args, **kwargs)

    return kernel
