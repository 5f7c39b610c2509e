"""Predicted beside measured: ``python -m tests.memory.beside_measured``.

Each step is a child's, in which nothing is there that an earlier one has left.
"""

import functools
import json
import os

import timm
import torch

import memengine
from memengine.memory import TrainingStep, map_blocks_singly, measure, predict

MODELS = {
    'vit': (
        dict(model_name='deit_tiny_patch16_224', img_size=112, depth=4, num_classes=10),
        (32, 3, 112, 112),
    ),
    'layer scale': (
        dict(
            model_name='vit_tiny_patch16_224',
            init_values=1e-5,
            img_size=112,
            depth=4,
            num_classes=10,
        ),
        (32, 3, 112, 112),
    ),
    'wide': (
        dict(model_name='deit3_small_patch16_224', img_size=112, depth=2, num_classes=10),
        (16, 3, 112, 112),
    ),
    'many kernels': (dict(model_name='mobilenetv3_large_100', num_classes=10), (32, 3, 96, 96)),
    'pointwise': (dict(model_name='densenet121', num_classes=10), (8, 3, 64, 64)),
    'resnet': (dict(model_name='resnet18', num_classes=10), (16, 3, 112, 112)),
}
TECHNIQUES = {
    'plain': (),
    'recomputed': (memengine.recompute_activations,),
    '8 bits': (functools.partial(memengine.quantize_activations, bits=8),),
    'recomputed, 4 bits': (
        memengine.recompute_activations,
        functools.partial(memengine.quantize_activations, bits=4),
    ),
    'offloaded': (memengine.offload_activations,),
}


def step(model: str, technique: str) -> TrainingStep:
    options, shape = MODELS[model]
    network = timm.create_model(**options)
    handles = [apply(network) for apply in TECHNIQUES[technique]]
    optimizer = torch.optim.AdamW(network.parameters())
    images, labels = torch.randn(shape), torch.randint(10, shape[:1])

    def run() -> None:
        assert len(handles) == len(TECHNIQUES[technique])
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(run, network, optimizer, [images, labels])


def main() -> None:
    torch.set_num_threads(1)
    for name in [
        *(('vit', technique) for technique in TECHNIQUES),
        ('layer scale', 'recomputed'),
        ('layer scale', '8 bits'),
        ('wide', 'plain'),  # whose patch embedding has a product for its gradient
        ('many kernels', 'recomputed'),
        ('pointwise', 'plain'),
        ('resnet', 'recomputed, 4 bits'),
    ]:
        if not os.fork():
            build = functools.partial(step, *name)
            map_blocks_singly()
            predicted = predict(build).peak_bytes  # which also imports all that a step needs
            print(json.dumps([*name, predicted, measure(build, steps=2).peak_bytes]), flush=True)
            os._exit(0)
        os.wait()


if __name__ == '__main__':
    main()
