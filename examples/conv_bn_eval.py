"""Frozen BatchNorm that keeps no activation of its own, while convolutions are trained.

python examples/conv_bn_eval.py
"""

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from memengine import SavedBytes, efficient_conv_bn_eval


def main() -> None:
    """Finetune a ResNet for three steps; the plain step's bytes beside them."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    model = torchvision.models.resnet18(num_classes=10).train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()  # its statistics stay as they are; its weight and bias are trained
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        with SavedBytes(model, images) as saved:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        print(f'loss {loss:.3f}')
        return saved.peak_bytes / 2**20

    plain = step()
    found = efficient_conv_bn_eval(model)
    less = [step() for _ in range(3)][-1]
    print(f'{len(found.fused)} pairs of convolution and BatchNorm')
    print(f'saved: {plain:.1f} MiB, with pairs {less:.1f} MiB')


if __name__ == '__main__':
    main()
