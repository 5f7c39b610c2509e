"""lightly-train: pretraining of a model of one's own with recomputed activations; two lines change.

python examples/beside/lightly_train_command.py
"""

import logging
import tempfile
from pathlib import Path

import lightly_train
import timm
from PIL import Image
from sklearn.datasets import load_digits

from memengine import SavedBytes, apply_techniques  # 1: this line is new


def pretrain(folder: Path, images: Path, **techniques: object) -> int:
    """SimCLR for two steps: the most bytes saved. Its augmentations follow no seed of torch's."""
    model = timm.create_model('resnet10t', num_classes=0)
    if techniques:
        apply_techniques(model, **techniques)  # 2: before it is trained
    with SavedBytes(model) as saved:
        lightly_train.pretrain(
            out=folder,
            data=images,
            model=model,
            method='simclr',
            epochs=1,
            batch_size=8,
            num_workers=0,
            accelerator='cpu',
            transform_args=dict(image_size=(32, 32)),
            embed_dim=32,
        )
    return saved.peak_bytes


if __name__ == '__main__':
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        images = Path(place) / 'images'
        images.mkdir()
        for number, digit in enumerate(load_digits().images[:16]):
            picture = Image.fromarray((digit * 15).astype('uint8')).convert('RGB')
            picture.save(images / f'{number}.png')
        most = pretrain(Path(place) / 'plain', images)
        less = pretrain(Path(place) / 'less', images, recomputed_activations=True)
    print(f'saved: {most / 2**20:.2f} MiB, recomputed {less / 2**20:.2f} MiB')
