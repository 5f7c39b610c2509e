"""transformers: its Trainer with recomputed activations; two lines change.

python examples/beside/transformers_trainer.py
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from memengine import SavedBytes
from memengine.engine.callbacks.transformers import TechniquesCallback  # 1: this line is new


def train(**techniques: object) -> tuple[dict[str, torch.Tensor], int]:
    """Train for four steps: the weights, and the most bytes saved."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:64, None] / 16  # [64, 1, 8, 8]
    samples = [
        dict(pixel_values=image, labels=int(label))
        for image, label in zip(images, digits.target[:64], strict=True)
    ]
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    model = ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
    )
    callbacks = [TechniquesCallback(**techniques)]  # 2: handed to the trainer
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=16,
            use_cpu=True,
            report_to='none',
            save_strategy='no',
            logging_strategy='no',
            disable_tqdm=True,
        )
        with SavedBytes(model) as saved:
            Trainer(model, arguments, train_dataset=samples, callbacks=callbacks).train()
    return model.state_dict(), saved.peak_bytes


if __name__ == '__main__':
    plain, plain_bytes = train()
    weights, less_bytes = train(recomputed_activations=True, activation_checkpointing='blocks')
    print('same weights:', all(torch.equal(plain[name], weights[name]) for name in plain))
    print(f'saved: {plain_bytes / 2**20:.2f} MiB, recomputed {less_bytes / 2**20:.2f} MiB')
