"""The gradient cache in the calls of grad-cache-con-learning and of GradCache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from memengine.suggest import did_you_mean
from memengine.techniques.slices.grad_cache import Tower, cached_step
from memengine.techniques.slices.sliced_step import synchronising
from memengine.techniques.slices.slicing import split_batch
from memengine.techniques.slices.tower import call_module

__all__ = ['GradCache']

LOSS_TYPES = ('SimCLR', 'SupCon', 'SelfCon')


class GradCache:
    """Gradient of a contrastive loss over the whole batch, in the memory of one chunk.

    Calling the object adds the gradient to the parameters, as ``loss.backward()`` would; zeroing
    gradients and the optimiser's step stay outside. There are two forms:

    * one ``model`` with a ``loss_type``: ``gc(images)`` or ``gc(images, labels)``. The images of
      SimCLR and SupCon are two views, ``cat([view1, view2])``, [2B, ...], and ``loss_fn`` is
      called with features [B, 2, D]. A SelfCon model returns (list of its sub-networks' features
      [B, D], its own features [B, D]), stacked to [B, n, D].
    * several ``models``, one per input: ``gc(x, y)``. ``loss_fn`` is called with one representation
      per model. The same model may be given twice.

    Args:
        model: The encoder, for the first form.
        chunk_size: Samples per chunk; for several models also one number for each.
        loss_fn: Takes features (and labels, where the call gives them), or representations; more
            keywords from the call.
        loss_type: ``'SimCLR'`` (no labels), ``'SupCon'`` (labels or ``mask=``) or ``'SelfCon'``
            (with or without labels).
        fp16: Run under fp16 autocast; needs ``scaler``.
        scaler: The ``GradScaler``, which the caller steps and updates.
        models: The encoders, for the second form.
        chunk_sizes: The same as ``chunk_size``.
        split_input_fn: ``split_input_fn(model_input, chunk_size)`` returns a list of chunks; needed
            for inputs that are not made of tensors.
        get_rep_fn: Picks the representation out of what a model returns.
        keep_graph: Chunks whose graph is kept and not built again; see ``cached_step``.
        forward_chunk_size: Samples per chunk of the graph-free pass, a multiple of the chunk size.
        backward: Called with the loss, and with a scalar for each chunk, in the place of
            ``loss.backward()``: Lightning's ``self.manual_backward``, accelerate's
            ``accelerator.backward``. It scales by itself, so that it goes without ``scaler``.
        within: What a trainer has wrapped around the models, if it has (Lightning's
            ``self.trainer.model``, which is DDP or the module itself): its DDP reduces gradients
            once, after the last chunk. Without it ``backward`` reduces after each chunk.

    Raises:
        TypeError: When neither or both of ``model`` and ``models`` are given, or no chunk size or
            loss; or arguments of the other form.
        ValueError: For a chunk size below 1, an unknown ``loss_type``, ``fp16`` without scaler, or
            a scaler (unless disabled) without ``fp16`` or beside ``backward``; in a step, for a
            model on several ranks that is not in DDP and no ``backward``, as its gradients would
            stay each rank's own, or be reduced by somebody who does not know of chunks.

    Cost, precision, random state, BatchNorm, DDP: see
    :func:`memengine.techniques.slices.grad_cache.cached_step`.

    Source: https://github.com/luyug/GradCache (Gao et al., 2021), whose calls these are, and its
    adaptation for vision, grad-cache-con-learning.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        chunk_size: int | Sequence[int] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        loss_type: str | None = None,
        fp16: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        *,
        models: Sequence[nn.Module] | None = None,
        chunk_sizes: int | Sequence[int] | None = None,
        split_input_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        get_rep_fn: Callable[[Any], Any] | None = None,
        keep_graph: int = 0,
        forward_chunk_size: int | None = None,
        backward: Callable[[Tensor], Any] | None = None,
        within: nn.Module | None = None,
    ) -> None:
        if (model is None) == (models is None):
            raise TypeError('GradCache: give either model= (one encoder) or models= (a list)')
        if (chunk_size is None) == (chunk_sizes is None):
            raise TypeError('GradCache: give either chunk_size= or chunk_sizes=')
        if loss_fn is None:
            raise TypeError('GradCache: loss_fn is missing')
        if fp16 and scaler is None and backward is None:
            raise ValueError('GradCache: fp16=True needs a scaler= (torch.amp.GradScaler)')
        if scaler is not None and scaler.is_enabled() and backward is not None:
            raise ValueError('GradCache: backward= scales the loss by itself; leave out scaler=')
        if scaler is not None and scaler.is_enabled() and not fp16:
            raise ValueError('GradCache: scaler= would not be used, as it is for fp16=True')
        if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
            raise TypeError('GradCache: models= is a list of encoders; a single one is model=')
        self.models = [model] if model is not None else list(models or ())
        self.chunk_sizes = _as_sizes(chunk_sizes if chunk_size is None else chunk_size, self.models)
        self.loss_fn = loss_fn
        self.loss_type = _loss_type(loss_type, one_model=model is not None)
        self.fp16 = fp16
        self.scaler = scaler if fp16 else None
        self.backward = backward
        self.within = within
        self.split_input_fn = split_input_fn or split_batch
        self.get_rep_fn = get_rep_fn
        self.keep_graph = keep_graph
        self._per_forward = [_per_forward_of(forward_chunk_size, size) for size in self.chunk_sizes]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """See :meth:`cache_step`."""
        return self.cache_step(*args, **kwargs)

    def cache_step(
        self, *model_inputs: Any, no_sync_except_last: bool = False, **loss_kwargs: Any
    ) -> Tensor:
        """Add the gradient of the batch's loss to the parameters.

        Args:
            *model_inputs: ``x`` or ``x, labels`` with one model (``labels=`` may be named); with
                several models one input each.
            no_sync_except_last: Checks that the models can hold back their synchronisation
                (DDP). Where they can they do so in any case: gradients are the same, and are
                reduced across ranks once instead of once per chunk.
            **loss_kwargs: Passed on to ``loss_fn``.

        Returns:
            The loss, without graph.

        Raises:
            TypeError: For another number of inputs, or a loss that takes others than it is given.
            ValueError: For labels that the loss type does not take or lacks, images that are not
                two views, models on several ranks without DDP, and what ``cached_step`` refuses.
        """
        on_ranks = dist.is_initialized() and dist.get_world_size() > 1
        if no_sync_except_last or (on_ranks and self.backward is None):
            self._check_synchronised(no_sync_except_last)
        if self.loss_type is None:
            loss_fn = self.loss_fn
        else:
            model_inputs, loss_fn = self._one_model_form(*model_inputs, **loss_kwargs)
            loss_kwargs = {}
        if len(model_inputs) != len(self.models):
            raise TypeError(
                f'GradCache: expected one input for each of {len(self.models)} models, '
                f'got {len(model_inputs)}'
            )
        towers = [
            Tower(
                model,
                self.split_input_fn(inputs, size),
                self._encode,
                per_forward,
                within=self.within,
            )
            for model, inputs, size, per_forward in zip(
                self.models, model_inputs, self.chunk_sizes, self._per_forward, strict=True
            )
        ]
        return cached_step(
            towers,
            lambda *embeddings: loss_fn(*embeddings, **loss_kwargs),
            keep_graph=self.keep_graph,
            context=self._context,
            backward=self._backward,
        )

    def _encode(self, model: nn.Module, inputs: Any) -> Any:
        outputs = call_module(model, inputs)
        return outputs if self.get_rep_fn is None else self.get_rep_fn(outputs)

    def _context(self) -> AbstractContextManager[Any]:
        if not self.fp16:
            return nullcontext()
        parameters = (parameter for model in self.models for parameter in model.parameters())
        return torch.autocast(next(parameters).device.type, torch.float16)

    def _backward(self, loss: Tensor) -> None:
        if self.backward is not None:
            self.backward(loss)
        else:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _check_synchronised(self, no_sync_except_last: bool) -> None:
        from torch.distributed.tensor import DTensor  # which FSDP reduces chunk by chunk

        for model in self.models if self.within is None else [self.within]:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            is_sharded = any(isinstance(parameter, DTensor) for parameter in trained)
            if not trained or synchronising(model) or (is_sharded and not no_sync_except_last):
                continue
            kind = type(model).__name__
            if no_sync_except_last:
                raise ValueError(
                    'GradCache: no_sync_except_last=True needs models wrapped in '
                    f'DistributedDataParallel, got {kind}; wrap it, or leave it out'
                )
            raise ValueError(
                f'GradCache: {kind} is on several ranks and not in DistributedDataParallel, so '
                'nobody would reduce its gradients once, after the last chunk. Wrap it; or, where '
                "a trainer has wrapped what it is in, give that trainer's backward=: Lightning's "
                "self.manual_backward, accelerate's accelerator.backward"
            )

    def _one_model_form(
        self, model_input: Any, labels: Tensor | None = None, **loss_kwargs: Any
    ) -> tuple[tuple[Any], Callable[[Any], Any]]:
        """Input and loss of the one-model form."""
        if self.loss_type == 'SimCLR' and labels is not None:
            raise ValueError("GradCache: loss_type='SimCLR' takes no labels; use 'SupCon'")
        if self.loss_type == 'SupCon' and labels is None and loss_kwargs.get('mask') is None:
            raise ValueError("GradCache: loss_type='SupCon' needs labels (or mask=); else 'SimCLR'")
        stack = _stack_outputs if self.loss_type == 'SelfCon' else _stack_halves
        given = () if labels is None else (labels,)  # as criterion(features), criterion(f, y)
        self._check_loss_takes(*given, **loss_kwargs)

        def loss_fn(outputs: Any) -> Any:
            return self.loss_fn(stack(outputs), *given, **loss_kwargs)

        return (model_input,), loss_fn

    def _check_loss_takes(self, *labels: Tensor, **loss_kwargs: Any) -> None:
        loss_fn = self.loss_fn
        try:
            called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
            signature = inspect.signature(called)
        except ValueError:  # of a function in C, which says itself what it does not take
            return
        try:
            signature.bind(None, *labels, **loss_kwargs)
        except TypeError as error:
            raise TypeError(
                f'GradCache: loss_type={self.loss_type!r} calls loss_fn with features [B, V, D]'
                f'{" and labels" if labels else ""}, which {type(loss_fn).__name__} does not take '
                f'({error}); give a loss of two views [B, D] each as '
                'loss_fn=lambda features: loss(*features.unbind(1))'
            ) from None


def _stack_halves(features: Any) -> Tensor:
    """[2B, ...] of ``cat([view1, view2])`` to [B, 2, ...]."""
    if not isinstance(features, Tensor) or len(features) % 2:
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(
            f'GradCache: expected the features [2B, D] of cat([view1, view2]), got {got}'
        )
    return torch.stack(features.chunk(2), dim=1)


def _stack_outputs(outputs: Any) -> Tensor:
    """(sub-networks' [B, ...], own [B, ...]) to [B, n, ...], own last."""
    if (
        not isinstance(outputs, (tuple, list))
        or len(outputs) != 2
        or isinstance(outputs[0], Tensor)
    ):
        raise ValueError(
            'GradCache: a SelfCon model must return (list of sub-network features, features), '
            f'got {type(outputs).__name__}'
        )
    return torch.stack([*outputs[0], outputs[1]], dim=1)


def _loss_type(loss_type: str | None, one_model: bool) -> str | None:
    if not one_model:
        if loss_type is not None:
            raise TypeError('GradCache: loss_type is for model=; with models= loss_fn gets it all')
        return None
    if loss_type is None:
        return 'SupCon'
    if loss_type not in LOSS_TYPES:
        hint = did_you_mean(loss_type, LOSS_TYPES, cutoff=0.4, after=';')
        raise ValueError(
            f'GradCache: loss_type must be one of {LOSS_TYPES}, got {loss_type!r}{hint}'
        )
    return loss_type


def _as_sizes(sizes: Any, models: Sequence[nn.Module]) -> list[int]:
    several = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes] * len(models)
    if len(several) != len(models):
        raise ValueError(f'GradCache: got {len(several)} chunk sizes for {len(models)} models')
    for size in several:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                'GradCache: chunk_size must be a whole number of samples, at least 1 (or a list '
                f'of them, one for each model), got {size!r}'
            )
    return several


def _per_forward_of(forward_chunk_size: int | None, chunk_size: int) -> int:
    if forward_chunk_size is None:
        return 1
    if forward_chunk_size < 1 or forward_chunk_size % chunk_size:
        raise ValueError(
            f'GradCache: forward_chunk_size must be a multiple of chunk_size={chunk_size}, '
            f'got {forward_chunk_size}'
        )
    return forward_chunk_size // chunk_size
