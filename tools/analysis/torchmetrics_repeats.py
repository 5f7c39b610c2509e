"""What torchmetrics counts where the sampler of 8 ranks repeats 4 of 540 images."""

import torch
from torch.utils.data import DistributedSampler
from torchmetrics.classification import BinaryAccuracy

IMAGES, RANKS, WRONG = 540, 8, 4  # the sampler repeats the first four


def main() -> None:
    """Add up what each rank's metric holds, as its reduction over ranks does."""
    predicted = (torch.arange(IMAGES) >= WRONG).long()
    right = counted = 0
    for rank in range(RANKS):
        index = list(DistributedSampler(range(IMAGES), RANKS, rank, shuffle=False))
        metric = BinaryAccuracy()
        metric.update(predicted[index], torch.ones(len(index)))
        right += int(metric.tp + metric.tn)
        counted += len(index)
    print(
        f'{counted} counted of {IMAGES}: {right / counted:.2%} instead of {1 - WRONG / IMAGES:.2%}'
    )


if __name__ == '__main__':
    main()
