"""Any timm model as a feature extractor."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.models import clean_state_dict
from torch import Tensor, nn

from memengine._torch_private.modules import BatchNorm
from memengine.engine.checkpoint.files import safe_loading
from memengine.engine.checkpoint.weights import parts_that_fit, read_weights, select
from memengine.registry import MODELS
from memengine.suggest import did_you_mean


@MODELS.register_module()
class TimmBackbone(nn.Sequential):
    """A timm model without its classifier: images [B, C, H, W] to pooled features [B, D].

    Args:
        model_name: Name in timm, e.g. ``'vit_small_patch16_224'`` or ``'resnet50'``.
        pretrained: Load timm's pretrained weights (needs the network or timm's cache).
        checkpoint_path: Load these weights instead: a local file in any format that timm reads for
            this model (as those of DINO, DINOv2 and CLIP), a checkpoint of a run, or its folder. A
            classifier in it is left out.
        checkpoint_part: Name of the module in that file that is this model, e.g.
            ``'teacher.backbone.model'``; by default the file is the model, or the only module in it
            that has all of the model's names.
        norm_eval: Keep BatchNorm layers in eval mode while training, so that their statistics stay
            those of the pretrained weights.
        **kwargs: Passed on to ``timm.create_model``, e.g. ``img_size``, ``patch_size``,
            ``drop_path_rate``, ``in_chans``, ``dynamic_img_size=True`` for multi-crop with a ViT
            (position embeddings are interpolated to the crop).

    Raises:
        ValueError: For a name or an argument that timm does not know, or a file that is missing or
            does not fit the model.
        CheckpointError: For a file that is damaged, or wants to run code when it is read.

    Attributes:
        model: The timm module.
        model_name: Its name in timm.
        arguments: What ``timm.create_model`` was given beside it.
        num_features: Width D of the features.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = False,
        checkpoint_path: str = '',
        checkpoint_part: str = '',
        norm_eval: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.norm_eval, self.model_name = norm_eval, model_name
        self.arguments: dict[str, Any] = {'num_classes': 0, **kwargs}
        if problem := self.config_problem({'model_name': model_name, **kwargs}):
            raise ValueError(f'TimmBackbone: {problem[0]}: {problem[1]}')
        try:
            with safe_loading(f'The pretrained file of {model_name}'):
                self.model = timm.create_model(model_name, pretrained=pretrained, **self.arguments)
        except TypeError as error:
            raise ValueError(
                f'TimmBackbone: {model_name} does not take these arguments: {error}'
            ) from error
        if checkpoint_path:
            _load(self.model, checkpoint_path, checkpoint_part)
        features: Any = self.model
        self.num_features: int = getattr(features, 'head_hidden_size', features.num_features)

    def train(self, mode: bool = True) -> TimmBackbone:
        """Switch training mode; with ``norm_eval`` BatchNorm layers stay out of it."""
        super().train(mode)
        for module in self.modules() if self.norm_eval else ():
            if isinstance(module, BatchNorm):
                module.eval()
        return self

    @staticmethod
    def further_arguments(config: Mapping[str, Any]) -> list[Callable[..., Any]]:
        """What may take ``**kwargs``: the networks of the file in which timm has the model."""
        model_name = str(config.get('model_name'))
        if not timm.is_model(model_name):
            return []
        module = sys.modules[timm.model_entrypoint(model_name).__module__]
        networks = [it for it in vars(module).values() if isinstance(it, type)]
        return [
            it
            for it in networks
            if issubclass(it, nn.Module) and 'num_classes' in inspect.signature(it).parameters
        ]

    @staticmethod
    def config_problem(config: Mapping[str, Any]) -> tuple[str, str] | None:
        """A setting, and what is wrong with it, that no type says."""
        model_name = config.get('model_name', '')
        if not timm.is_model(model_name):
            hint = did_you_mean(model_name, timm.list_models(), after=';')
            return 'model_name', f'timm has no model {model_name!r}{hint}'
        for whole, part in (('img_size', 'patch_size'), ('embed_dim', 'num_heads')):
            size, divisor = config.get(whole), config.get(part)
            if isinstance(size, int) and isinstance(divisor, int) and size % divisor:
                return part, f'must divide {whole}={size}, got {divisor}'
        return None

    def exit_widths(self, exits: Sequence[int]) -> list[int]:
        """Channels of the stages that :meth:`with_exits` leaves at.

        Raises:
            ValueError: For a stage that the model does not have, or a model that cannot be left.
        """
        model: Any = self.model
        name = type(model).__name__
        if not hasattr(model, 'forward_intermediates') or not hasattr(model, 'feature_info'):
            raise ValueError(
                f'TimmBackbone: {name} has no intermediate features in timm; use another model'
            )
        stages = list(model.feature_info)
        for number in exits:
            if not -len(stages) <= number < len(stages):
                modules = ', '.join(f'{i} {stage["module"]}' for i, stage in enumerate(stages))
                raise ValueError(
                    f'TimmBackbone: exit {number} is none of the stages of {name}: {modules}'
                )
        return [stages[number]['num_chs'] for number in exits]

    def with_exits(self, images: Tensor, exits: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Features, and those after intermediate stages, in one forward pass.

        Args:
            images: [B, C, H, W].
            exits: Places in timm's ``feature_info``, each once.

        Returns:
            Features [B, D] as from ``forward``, and for each exit the stage's mean over the
            image, [B, channels].
        """
        model: Any = self.model
        count = len(model.feature_info)
        indices = [number % count for number in exits]
        last, stages = model.forward_intermediates(
            images, indices=sorted(indices), norm=False, output_fmt='NCHW'
        )
        by_index = dict(zip(sorted(indices), stages, strict=True))
        return model.forward_head(last), [by_index[i].mean(dim=(2, 3)) for i in indices]

    @property
    def place_width(self) -> int:
        """Width of the places of :meth:`with_places`."""
        return int(self.model.num_features)  # type: ignore[arg-type]

    def with_places(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and those of an image's places before they are pooled, in one forward pass.

        Args:
            images: [B, C, H, W].

        Returns:
            Features [B, D] as from ``forward``; the last places, [B, N, place_width]: a ViT's
            tokens, or the pixels of a network that keeps them in rows and columns.
        """
        model: Any = self.model
        last = model.forward_features(images)
        places = last
        if last.dim() == 4:
            are_channels_first = last.shape[1] == self.place_width  # Swin's are last
            places = (last.movedim(1, -1) if are_channels_first else last).flatten(1, 2)
        return model.forward_head(last), places


_TIMMS_ENTRIES = ('state_dict_ema', 'model_ema', 'state_dict', 'model')  # averages first


def _load(model: Any, file: str, part: str) -> None:
    """Weights of the same network, with or without a classifier."""
    if not Path(file).exists():
        raise ValueError(f'TimmBackbone: there is no file checkpoint_path={file!r}')
    name = model.pretrained_cfg['architecture']
    no_fit = f'TimmBackbone: checkpoint_path={file!r} does not fit {name}'
    if Path(file).suffix in ('.npz', '.npy'):  # NumPy's, which timm reads whole, and no pickles
        try:
            model.load_pretrained(file)
        except Exception as error:  # of any kind: the bytes may say anything
            raise ValueError(f'{no_fit}: {error}') from error
        return
    state = select(clean_state_dict(read_weights(file, _TIMMS_ENTRIES)), (), part, '')
    names = list(state)
    parts = [name for name in parts_that_fit(names, model.state_dict()) if name]
    if not part and len(parts) == 1 and model.state_dict().keys().isdisjoint(names):
        state = select(state, (), parts[0], '')
    adapt = getattr(sys.modules[type(model).__module__], 'checkpoint_filter_fn', None)
    try:
        keys = model.load_state_dict(adapt(state, model) if adapt else state, strict=False)
    except (
        AttributeError,
        KeyError,
        RuntimeError,
        TypeError,
    ) as error:  # of another shape, or none
        first = ' '.join(line.strip() for line in str(error).splitlines()[:2])
        raise ValueError(f'{no_fit}: {first}') from error
    classifiers = model.pretrained_cfg.get('classifier') or ()
    heads = (classifiers,) if isinstance(classifiers, str) else classifiers
    others = [key for key in keys.unexpected_keys if key.rpartition('.')[0] not in heads]
    if keys.missing_keys or others:
        raise ValueError(
            f'{no_fit}: missing {keys.missing_keys[:3]}, unknown {others[:3]}'
            + ''.join(f'; it is there as checkpoint_part={part!r}' for part in parts)
        )
