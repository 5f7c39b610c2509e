"""open_clip: its model and loss on batches 8 times as large in the same bytes; three lines change.

python examples/beside/open_clip_loop.py
"""

import torch
from open_clip import CLIP, ClipLoss
from sklearn.datasets import load_digits

from memengine import GradCache, SavedBytes  # 1: this line is new

VISION = dict(image_size=8, layers=2, width=64, head_width=16, patch_size=2)
TEXT = dict(context_length=8, vocab_size=16, width=64, heads=4, layers=2)


def train(batch_size: int, chunk_size: int | None) -> tuple[list[float], int]:
    """Train for three steps, in chunks or plainly: the losses, and the most bytes saved."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:batch_size, None] / 16
    images = images.expand(-1, 3, -1, -1)  # [B, 3, 8, 8]
    texts = torch.tensor(digits.target)[:batch_size, None] + torch.arange(8) % 2  # [B, 8]
    model, criterion = CLIP(32, VISION, TEXT), ClipLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def features_of(outputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        return outputs[1] if outputs[0] is None else outputs[0]

    def loss_of(image_features: torch.Tensor, text_features: torch.Tensor) -> torch.Tensor:
        return criterion(image_features, text_features, model.logit_scale.exp())

    if chunk_size:  # 2: made once
        of_towers = dict(models=[model, model], chunk_size=chunk_size, get_rep_fn=features_of)
        cache = GradCache(**of_towers, loss_fn=loss_of)
    losses, most = [], 0
    for _ in range(3):
        with SavedBytes(model, images, texts) as saved:
            if chunk_size:
                loss = cache(dict(image=images), dict(text=texts))  # 3: in the place of the step
            else:
                loss = loss_of(*model(images, texts)[:2])
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        most = max(most, saved.peak_bytes)
    return losses, most


if __name__ == '__main__':
    (plain, most), (chunked, less), (_, small) = train(64, None), train(64, 8), train(8, None)
    print('loss', *(f'{loss:.5f}' for loss in plain), 'in chunks', *(f'{x:.5f}' for x in chunked))
    print(f'saved: {most / 2**20:.1f} MiB, in chunks {less / 2**20:.1f} MiB')
    print(f'8 samples, plainly: {small / 2**20:.1f} MiB')
