"""Offloading the activations of a model: the setting, and the handle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memengine._torch_private.autograd import is_under_forward_ad, is_under_functorch
from memengine._torch_private.ops import do_not_compile, pytree
from memengine.technique import PausableHandle, Report, Settings, Technique, setting, with_settings
from memengine.techniques.activation_offload.moving import Offloading
from memengine.techniques.modules.wrapped_forward import WrappedForward, is_wrapped

_SETTING = 'activation_offload'


def offload_activations(
    model: nn.Module,
    store: str = 'auto',
    *,
    folder: str | Path | None = None,
    min_bytes: int = 2**20,
    look_ahead: int = 2,
) -> ActivationOffload:
    """Let what a model saves for backward wait outside the device's memory. Exact.

    Left where they are: parameters, buffers and the model's inputs, which live anyway; tensors
    below ``min_bytes``; tensor subclasses and sparse tensors; what other saved-tensor hooks inside
    the model take. A storage that is saved several times, or in several views, moves once. Of
    dropped or quantised activations, applied before, the codes move. Under activation
    checkpointing, applied before, the inputs of checkpointed modules move, and what they keep
    (torch >= 2.9).

    Args:
        model: Its ``forward`` is wrapped; the model stays what it is.
        store: ``'host'`` for host memory (pinned for a model on an accelerator), ``'disk'`` for
            files, ``'auto'`` for host memory on an accelerator and files on a CPU.
        folder: Where the files go; a temporary folder by default. They have no names there, and are
            gone with the graph, or with a process that is killed.
        min_bytes: Smallest storage that moves, in bytes.
        look_ahead: How many storages are brought back before they are asked for. Each costs its
            bytes on the device; 0 brings back what is asked for and waits.

    Returns:
        The handle: ``stored_bytes``, ``peak_stored_bytes``, ``moved_bytes``, ``undo()``.

    Raises:
        ValueError: For an unknown store, a folder without files, sizes below 0, or a model that
            is offloaded already.
        OSError: In a forward, when no file can be written.

    Cost: every byte once out and once back, on CUDA beside the computation. On the device are what
    is not moved, ``look_ahead`` storages, and those in use: from the first op that asks for one to
    the last. No computation. Autocast, BatchNorm and random state are not touched; DDP, FSDP,
    slices and the gradient cache compose, as does ``torch.compile``, whose graphs save too.

    Source: ``torch.autograd.graph.save_on_cpu`` is the plain form, without look-ahead, sharing or
    minimum size.
    """
    given = dict(store=store, folder=folder, min_bytes=min_bytes, look_ahead=look_ahead)
    TECHNIQUE.set_to(given)  # refuses what they cannot be
    if is_wrapped(model, ActivationOffload):
        raise ValueError(f'{_SETTING}: {type(model).__name__} is offloaded already')
    offload = ActivationOffload(model, store, folder, min_bytes, look_ahead)
    offload.begin()
    return offload


class ActivationOffload(WrappedForward, PausableHandle):
    """A model's forward whose saved tensors move; made by :func:`offload_activations`.

    Attributes:
        stored_bytes: Bytes in the store now.
        peak_stored_bytes: The most so far.
        moved_bytes: Bytes that went out so far, and came back: a pair.
    """

    setting = _SETTING

    def __init__(
        self, module: nn.Module, store: str, folder: str | Path | None, min_bytes: int, ahead: int
    ) -> None:
        super().__init__('', module)
        self.store, self.folder = store, folder
        self.min_bytes, self.look_ahead = min_bytes, ahead
        self.stored_bytes = self.peak_stored_bytes = 0
        self.moved_bytes = (0, 0)
        self._has_run = False

    @do_not_compile(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; what it saves moves."""
        is_transformed = is_under_functorch() or is_under_forward_ad()  # nothing moves there
        if self.is_paused or not torch.is_grad_enabled() or is_transformed:
            return self.plain(*args, **kwargs)
        self._has_run = True
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with Offloading(self, inputs):
            return self.plain(*args, **kwargs)

    def report(self) -> Report:
        """What has moved."""
        if not self._has_run:
            return Report(
                left=f'{_SETTING}: the forward of {type(self.module).__name__} was not called with '
                'gradients in the first iteration; apply it to the module whose forward is'
            )
        if not self.moved_bytes[0]:
            return Report(
                left=f'{_SETTING}: the first iteration saved nothing of at least '
                f'min_bytes={self.min_bytes} that can be moved; lower min_bytes'
            )
        return Report(
            f'Activation offload: {self.moved_bytes[0] / 2**20:.1f} MiB moved in the first '
            f'iteration, {self.peak_stored_bytes / 2**20:.1f} MiB of them at once'
        )

    def count_bytes(self, stored: int = 0, out: int = 0, back: int = 0) -> None:
        """Note bytes that came into the store, moved out and came back."""
        self.stored_bytes += stored
        self.peak_stored_bytes = max(self.peak_stored_bytes, self.stored_bytes)
        self.moved_bytes = (self.moved_bytes[0] + out, self.moved_bytes[1] + back)


@dataclass(frozen=True)
class ActivationOffloadSettings(Settings):
    """Settings of :func:`offload_activations`."""

    store: Literal['auto', 'host', 'disk'] = setting(
        'auto', help='where to: host memory, files, or files on a CPU only'
    )
    folder: str | Path | None = setting(None, help='where files go; None: a temporary folder')
    min_bytes: int = setting(2**20, help='smallest storage that moves', unit='bytes', low=0)
    look_ahead: int = setting(
        2, help='how many are brought back before they are asked for', unit='storages', low=0
    )
    strict: bool = setting(True, help='whether it is an error when the first step moves nothing')

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is not None and self.store == 'host':
            raise ValueError(f"folder={str(self.folder)!r} is for store='disk', not 'host'")


TECHNIQUE = Technique(
    key=_SETTING,
    title='activation offload',
    settings=ActivationOffloadSettings,
    apply=with_settings(offload_activations),
    call='memengine.offload_activations',
    shorthand='store',
    after=('activation_checkpointing',),  # what is left to save moves, and codes for tensors
    use_when='what is left does not fit on the GPU, and host memory is free',
    saves='what is saved for backward, on the device',
    price='every byte to the host and back',
    page='activation_checkpointing.md',
    example=ActivationOffloadSettings(store='disk', min_bytes=64),
)
