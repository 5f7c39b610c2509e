"""Where a Vision Transformer looks: the attention of its last block.

Shapes: B images, N tokens (prefix tokens, then h * w patches), d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


class NoAttentionError(TypeError):
    """The model has no attention over all patches of an image."""


class _AttentionRecorder(TorchFunctionMode):
    """Keeps what the last attention product was given, or its softmax where it is written out.

    This is what the block itself computes with: after normalisation of q and k, rotary
    embeddings and masks, whichever it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.product: dict[str, Any] | None = None
        self.softmax: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.on and func is F.scaled_dot_product_attention:
            names = ('query', 'key', 'value', 'attn_mask', 'dropout_p', 'is_causal', 'scale')
            self.product = {**dict(zip(names, args, strict=False)), **kwargs}
        elif self.on and func in _SOFTMAX:
            self.softmax = result
        return result


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Without gradients, and dropout off; the model's modules are left as they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def attention_maps(backbone: nn.Module, images: Tensor) -> Tensor:
    """How much each patch of an image is attended to in the last block.

    With a class token: its attention to the patches. Where the features are pooled from the
    patches instead: the mean of all patches' attention. Prefix tokens (class, register,
    distillation) are left out of what is attended to, so a map sums to less than 1 where they
    draw attention.

    Args:
        backbone: A Vision Transformer of timm (``VisionTransformer``, ``Eva``, ``Beit``, ...).
            It is run in eval mode, without gradients, and left as it was.
        images: [B, C, H, W], as the backbone takes them.

    Returns:
        [B, heads, h, w] in float32, h * w patches.

    Raises:
        NoAttentionError: A TypeError, for a model without global attention over patches.
        ValueError: When the patches do not form the grid that the image size implies.
    """
    blocks = getattr(backbone, 'blocks', None)
    if not isinstance(blocks, (nn.Sequential, nn.ModuleList)) or not hasattr(
        backbone, 'patch_embed'
    ):
        raise NoAttentionError(
            f'attention_maps: {type(backbone).__name__} has no blocks with attention over patches; '
            'a Vision Transformer of timm is needed'
        )
    recorder = _AttentionRecorder()
    handles = [
        blocks[-1].register_forward_pre_hook(lambda *_: setattr(recorder, 'on', True)),
        blocks[-1].register_forward_hook(lambda *_: setattr(recorder, 'on', False)),
    ]
    try:
        with in_eval_mode(backbone), recorder:
            backbone(images)
    finally:
        for handle in handles:
            handle.remove()
    prefix = int(getattr(backbone, 'num_prefix_tokens', 0))
    by_class_token = prefix > 0 and getattr(backbone, 'global_pool', 'token') == 'token'
    rows = slice(0, 1) if by_class_token else slice(prefix, None)
    attention = _attention(recorder, rows)
    if attention is None or len(attention) != len(images):
        raise NoAttentionError(
            f'attention_maps: the last block of {type(backbone).__name__} does not attend over all '
            'patches of an image; a Vision Transformer with global attention is needed'
        )
    height, width = _patch_grid(backbone, images)
    patches = attention.mean(dim=2)[..., prefix:]  # [B, heads, h * w]
    if patches.shape[-1] != height * width:
        raise ValueError(
            f'attention_maps: images of {images.shape[-2]} x {images.shape[-1]} should give '
            f'{height} x {width} patches, but the last block of {type(backbone).__name__} sees '
            f'{patches.shape[-1]}'
        )
    return patches.unflatten(-1, (height, width)).float()


def _attention(recorder: _AttentionRecorder, rows: slice) -> Tensor | None:
    """Attention of the queries in ``rows``, [B, heads, queries, N]; None if there was none."""
    given = recorder.product
    if given is None:
        return None if recorder.softmax is None else recorder.softmax[:, :, rows]
    query, key = given['query'], given['key']  # [B, heads, N, d]
    if query.ndim != 4:
        return None
    if key.shape[1] != query.shape[1]:  # grouped queries
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = given.get('scale') or 1 / math.sqrt(query.shape[-1])
    logits = query[:, :, rows] @ key.mT * scale
    mask = given.get('attn_mask')
    if mask is not None:
        mask = mask.expand(*query.shape[:2], query.shape[2], key.shape[2])[:, :, rows]
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(dim=-1)


def _patch_grid(backbone: nn.Module, images: Tensor) -> tuple[int, int]:
    """Patches along the height and the width of the images."""
    size: Any = backbone.patch_embed.patch_size  # type: ignore[union-attr]
    along_height, along_width = (size, size) if isinstance(size, int) else size
    # a model may pad the image to whole patches
    return math.ceil(images.shape[-2] / along_height), math.ceil(images.shape[-1] / along_width)


def save_attention_figure(images: Tensor, maps: Tensor, path: str | Path) -> None:
    """Draw each image beside its mean map and the map of each head.

    Args:
        images: [B, C, H, W] with 1 or 3 channels, of any range; each is stretched to its own.
        maps: [B, heads, h, w], from ``attention_maps``.
        path: Where the PNG goes; folders are made.
    """
    from memengine.visualization.figures import figure_of, for_imshow, save_figure

    maps = maps.detach().float().cpu()
    columns = 2 + maps.shape[1]
    figure, axes = figure_of(len(images), columns, width=1.3 * columns, height=1.3 * len(images))
    for row, (image, heads) in enumerate(zip(images, maps, strict=True)):
        axes[row][0].imshow(for_imshow(image), cmap='gray', vmin=0, vmax=1)
        for column, one in enumerate([heads.mean(dim=0), *heads], start=1):
            axes[row][column].imshow(one.numpy(), cmap='viridis', vmin=0)
    for column, title in enumerate(
        ['image', 'mean', *(f'head {h}' for h in range(1, columns - 1))]
    ):
        axes[0][column].set_title(title, fontsize=8)
    for axis in figure.axes:
        axis.set_axis_off()
    save_figure(figure, path)
