"""A backbone in the form of other libraries and runtimes, each read back and compared.

Shapes: B images, D width of the features.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memengine.evaluation.after_training.backbones import Backbone
from memengine.evaluation.after_training.open_clip_layout import export_to_open_clip

__all__ = ['EXPORTERS', 'Exporter', 'relative_error']

Exporter = Callable[[Backbone, Tensor, Path], tuple[str, float]]

WEIGHTS = 'model.safetensors'
_MOST_IMAGES = 1 << 20  # of a batch; torch 2.6 refuses a size without a bound


def relative_error(found: Any, expected: Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return ((torch.as_tensor(found) - expected).abs().max() / scale).item()


def _save_weights(network: nn.Module, folder: Path) -> None:
    contiguous = torch.contiguous_format  # safetensors refuses others, such as channels_last
    state = {
        name: value.detach().clone(memory_format=contiguous)
        for name, value in network.state_dict().items()
    }
    save_file(state, folder / WEIGHTS, metadata={'format': 'pt'})


def _with_network(backbone: Backbone, network: nn.Module) -> nn.Module:
    """The backbone around another network of the library."""
    module = copy.deepcopy(backbone.module)
    if backbone.network is backbone.module:
        return network
    module.model = network
    return module.eval()


def _timm(backbone: Backbone, images: Tensor, folder: Path) -> tuple[str, nn.Module]:
    """Also ``config.json`` as timm's hub has it.

    Without the run's own, timm crops and normalises images as ImageNet's are.
    """
    import timm

    network: Any = backbone.network
    name, arguments = network.pretrained_cfg['architecture'], _arguments(backbone)
    _save_weights(network, folder)
    config = dict(
        architecture=name,
        num_classes=0,
        num_features=network.num_features,
        model_args={key: value for key, value in arguments.items() if key != 'num_classes'},
        pretrained_cfg=dict(
            num_classes=0, input_size=list(images.shape[1:]), **backbone.preprocessing
        ),
    )
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    path = str(folder / WEIGHTS)
    loaded = timm.create_model(name, checkpoint_path=path, **arguments)
    call = _call(f"timm.create_model('{name}'", {'checkpoint_path': WEIGHTS, **arguments})
    return f'import timm\n\nmodel = {call}', _with_network(backbone, loaded)


def _torchvision(backbone: Backbone, images: Tensor, folder: Path) -> tuple[str, nn.Module]:
    """The classifier, which was not trained, is not in the file."""
    from torchvision.models import get_model

    module: Any = backbone.module
    arguments = _arguments(backbone)
    _save_weights(backbone.network, folder)
    loaded = get_model(module.model_name, weights=None, **arguments)
    missing = loaded.load_state_dict(load_file(folder / WEIGHTS), strict=False).missing_keys
    classifier = missing[0].rpartition('.')[0]
    loaded.set_submodule(classifier, nn.Identity())
    code = f"""\
from safetensors.torch import load_file
from torch import nn
from torchvision.models import get_model

model = {_call(f"get_model('{module.model_name}'", arguments)}
model.set_submodule('{classifier}', nn.Identity())  # the classifier, which was not trained
model.load_state_dict(load_file('{WEIGHTS}'))"""
    return code, _with_network(backbone, loaded)


def _transformers(backbone: Backbone, images: Tensor, folder: Path) -> tuple[str, nn.Module]:
    """Without memengine the model gives tokens, and a pooled output by new weights.

    So the card says which tokens are the run's features, as ``TransformersImage`` takes them.
    """
    import transformers

    network: Any = backbone.network
    network.save_pretrained(folder)
    loaded = type(network).from_pretrained(folder)
    assert isinstance(loaded, transformers.PreTrainedModel)
    code = 'from transformers import AutoModel\n\nmodel = AutoModel.from_pretrained(FOLDER)'
    if type(backbone.module).__name__ == 'TransformersImage':  # no subclass, which may take others
        module: Any = backbone.module
        taken = '[:, 0]' if module.pool == 'token' else '.mean(dim=1)'
        code += f"""

tokens = model(pixel_values=images).last_hidden_state  # a pooler was not trained
features = tokens{taken}  # [B, C, H, W] to [B, D]"""
    return code, _with_network(backbone, loaded)


def _other(backbone: Backbone, images: Tensor, folder: Path) -> tuple[str, nn.Module]:
    _save_weights(backbone.module, folder)
    loaded = copy.deepcopy(backbone.module)
    loaded.load_state_dict(load_file(folder / WEIGHTS))
    kind = type(backbone.module).__name__
    code = f'from safetensors.torch import load_file\n\nmodel = {kind}(...)\n'
    return f"{code}model.load_state_dict(load_file('{WEIGHTS}'))", loaded


_LIBRARIES = {'timm': _timm, 'torchvision': _torchvision, 'transformers': _transformers}


def _weights(backbone: Backbone, images: Tensor, folder: Path) -> tuple[str, float]:
    """The weights by the names of the network's own library, which then loads them by itself."""
    code, loaded = _LIBRARIES.get(backbone.library, _other)(backbone, images, folder)
    return code, relative_error(loaded.eval()(images), backbone.module(images))


def _arguments(backbone: Backbone) -> dict[str, Any]:
    module: Any = backbone.module
    return dict(module.arguments)


def _call(start: str, arguments: Mapping[str, Any]) -> str:
    return ', '.join([start, *(f'{key}={value!r}' for key, value in arguments.items())]) + ')'


def _any_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim('batch', max=_MOST_IMAGES)},)


def _torch_export(backbone: Backbone, images: Tensor, folder: Path) -> tuple[str, float]:
    """A graph that takes batches of any size."""
    path = folder / 'model.pt2'
    program = torch.export.export(backbone.module, (images,), dynamic_shapes=_any_batch())
    torch.export.save(program, path)
    more = torch.cat([images, images[:1]])
    error = relative_error(torch.export.load(path).module()(more), backbone.module(more))
    return f"import torch\n\nmodel = torch.export.load('{path.name}').module()", error


def _onnx(backbone: Backbone, images: Tensor, folder: Path) -> tuple[str, float]:
    """A graph that takes batches of any size."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch.onnx wants it)
    except ImportError as error:
        raise ImportError(
            "export.to=['onnx'] needs three packages: pip install onnx onnxscript onnxruntime"
        ) from error
    path = folder / 'model.onnx'
    torch.onnx.export(
        backbone.module,
        (images,),
        path,
        dynamo=True,
        verbose=False,
        dynamic_shapes=_any_batch(),
        input_names=['images'],
        output_names=['features'],
    )
    more = torch.cat([images, images[:1]])
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    (found,) = session.run(None, {'images': more.numpy()})
    code = f"""\
import onnxruntime

session = onnxruntime.InferenceSession('{path.name}')
features = session.run(None, {{'images': images}})[0]  # NumPy, [B, C, H, W] to [B, D]"""
    return code, relative_error(found, backbone.module(more))


EXPORTERS: Mapping[str, Exporter] = {
    'onnx': _onnx,
    'open_clip': export_to_open_clip,
    'torch_export': _torch_export,
    'weights': _weights,
}
