"""Bytes that a rank receives in collectives, counted and not sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from memengine._torch_private.distributed import process_group_of
from memengine._torch_private.ops import TorchDispatchMode, argument_names, pytree

# Whose operators communicate.
_OPERATOR_LIBRARIES = frozenset(
    ('c10d', '_c10d_functional', '_c10d_functional_autograd', 'c10d_functional')
    + ('_dtensor', 'symm_mem')
)


class _Collective:
    """A collective's arguments by name, and the group in it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        named = 'group_name' if 'group_name' in values else 'process_group'
        group = process_group_of(values[named])
        self.ranks, self.rank = group.size(), group.rank()

    def nbytes(self, *names: str) -> int:
        """Bytes of the tensors in the first of the arguments that there is."""
        tensors = pytree.tree_leaves(next(self.values[n] for n in names if n in self.values))
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

    @property
    def outputs(self) -> int:
        return self.nbytes('output_tensors', 'output_tensor', 'output_lists', 'outputs', 'output')

    @property
    def inputs(self) -> int:
        return self.nbytes(
            'input_tensors', 'input_tensor', 'input_list', 'inputs', 'input', 'tensors', 'tensor'
        )

    @property
    def is_root(self) -> bool:
        return self.rank == self.values.get('root_rank', self.values.get('src'))

    def from_others(self, nbytes: float) -> float:
        """What others have sent of it, each its own number of rows or all as many."""
        rows = self.values['output_split_sizes'] or [1] * self.ranks
        return nbytes * (1 - rows[self.rank] / sum(rows)) if sum(rows) else 0.0


# What a rank receives in a collective, in bytes.
_RECEIVED: dict[str, Callable[[_Collective], float]] = {
    'nothing': lambda call: 0.0,
    'everything': lambda call: call.inputs,
    'all_reduce': lambda call: 2 * call.inputs * (call.ranks - 1) / call.ranks,
    # Added up in parts, which the root receives then.
    'reduce': lambda call: (1 + call.is_root) * call.inputs * (call.ranks - 1) / call.ranks,
    'broadcast': lambda call: 0.0 if call.is_root else call.inputs,
    'gathered': lambda call: max(call.outputs - call.inputs, 0),  # no outputs but at a root
    'scattered': lambda call: 0.0 if call.inputs else call.outputs,
    'to_root': lambda call: max(call.outputs - call.inputs, 0) if call.is_root else 0.0,
    'reduce_scatter': lambda call: call.inputs - call.outputs,
    'all_to_all_of_lists': lambda call: (
        call.outputs - call.values['output_tensors'][call.rank].nbytes
    ),
    'all_to_all': lambda call: call.from_others(call.outputs),
    'functional_all_gather': lambda call: call.inputs * (call.ranks - 1),
    'share_of_others': lambda call: call.inputs * (call.ranks - 1) / call.ranks,
    'functional_all_to_all': lambda call: call.from_others(
        sum(call.values['output_split_sizes']) * call.values['input'][:1].nbytes
    ),
}

# By operator: what to call it, and which of these.
_RULES: dict[str, dict[str, tuple[str, str]]] = {
    'c10d': {
        '_allgather_base_': ('all_gather_into_tensor', 'gathered'),
        '_reduce_scatter_base_': ('reduce_scatter_tensor', 'reduce_scatter'),
        'allgather_': ('all_gather', 'gathered'),
        'allgather_coalesced_': ('all_gather_coalesced', 'gathered'),
        'allgather_into_tensor_coalesced_': ('all_gather_into_tensor_coalesced', 'gathered'),
        'allreduce_': ('all_reduce', 'all_reduce'),
        'allreduce_coalesced_': ('all_reduce_coalesced', 'all_reduce'),
        'alltoall_': ('all_to_all', 'all_to_all_of_lists'),
        'alltoall_base_': ('all_to_all_single', 'all_to_all'),
        'barrier': ('barrier', 'nothing'),
        'broadcast_': ('broadcast', 'broadcast'),
        'check_for_nan': ('check_for_nan', 'nothing'),
        'gather_': ('gather', 'gathered'),
        'gather_into_tensor_': ('gather_into_tensor', 'to_root'),
        'monitored_barrier_': ('monitored_barrier', 'nothing'),
        'recv_': ('recv', 'everything'),
        'recv_any_source_': ('recv', 'everything'),
        'reduce_': ('reduce', 'reduce'),
        'reduce_scatter_': ('reduce_scatter', 'reduce_scatter'),
        'reduce_scatter_tensor_coalesced_': ('reduce_scatter_tensor_coalesced', 'reduce_scatter'),
        'scatter_': ('scatter', 'scattered'),
        'send': ('send', 'nothing'),
    },
    '_c10d_functional': {
        '_wrap_tensor_autograd': ('wait', 'nothing'),
        'all_gather_into_tensor': ('all_gather_into_tensor', 'functional_all_gather'),
        'all_gather_into_tensor_coalesced': (
            'all_gather_into_tensor_coalesced',
            'functional_all_gather',
        ),
        'all_gather_into_tensor_out': ('all_gather_into_tensor', 'functional_all_gather'),
        'all_reduce': ('all_reduce', 'all_reduce'),
        'all_reduce_': ('all_reduce', 'all_reduce'),
        'all_reduce_coalesced': ('all_reduce_coalesced', 'all_reduce'),
        'all_reduce_coalesced_': ('all_reduce_coalesced', 'all_reduce'),
        'all_to_all_single': ('all_to_all_single', 'functional_all_to_all'),
        'broadcast': ('broadcast', 'broadcast'),
        'broadcast_': ('broadcast', 'broadcast'),
        'reduce_scatter_tensor': ('reduce_scatter_tensor', 'share_of_others'),
        'reduce_scatter_tensor_coalesced': ('reduce_scatter_tensor_coalesced', 'share_of_others'),
        'reduce_scatter_tensor_out': ('reduce_scatter_tensor', 'share_of_others'),
        'wait_tensor': ('wait', 'nothing'),
        'wait_tensors': ('wait', 'nothing'),
    },
    '_dtensor': {
        'mesh_get_process_group': ('wait', 'nothing'),
        'shard_dim_alltoall': ('all_to_all_single', 'share_of_others'),
    },
}


class ReceivedBytes(TorchDispatchMode):
    """Counts what this rank receives from others while it is entered.

    It is what the algorithms that need the fewest bytes move, whatever the backend does: a gather
    receives what the rank has not, an all-reduce twice (N - 1) / N of its tensor (once to add up,
    once to hand out), an exchange between all what the others send. Operators of torch are counted,
    so it does not matter which function called them: also those of DDP, ``fully_shard``, DTensor,
    batches of sends, and of the backward pass.

    Attributes:
        nbytes: Bytes so far, tensors of embeddings and their gradients among them.
        calls: Number of collectives so far, by the name of torch's function.

    Raises:
        NotImplementedError: For a collective that it does not know, rather than count nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which does its communication in operators of its own
        kwargs = kwargs or {}
        if func.namespace in _OPERATOR_LIBRARIES:
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rule = _RULES.get(func.namespace, {}).get(func.overloadpacket.__name__)
        if rule is None:
            raise NotImplementedError(
                f'ReceivedBytes does not know how many bytes {func} receives; add it to the rules '
                f'of {__name__}'
            )
        name, received = rule
        if received == 'nothing':
            return
        names = argument_names(func)
        call = _Collective(dict(zip(names, args, strict=False)) | kwargs)
        self.nbytes += _RECEIVED[received](call)
        self.calls[name] = self.calls.get(name, 0) + 1
