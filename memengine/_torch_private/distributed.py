"""What torch keeps private of FSDP2, process groups and sharded checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    'CAN_SHARD_ON_CPU',
    'METADATA_RECORDS',
    'gather_on_compute_stream',
    'mark_as_root',
    'process_group_of',
]

CAN_SHARD_ON_CPU = hasattr(torch.cpu.Stream, 'record_event')
"""Whether ``fully_shard`` runs on CPUs: it records events on streams, as those of 2.6 cannot."""

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
