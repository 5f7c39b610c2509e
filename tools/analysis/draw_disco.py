"""Draw who holds what of a contrastive loss over ranks: ``docs/images/disco.svg``."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use('svg')
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

RANKS = 4
COLOURS = ('#4878a8', '#e49444', '#6a9f58', '#967662')
FAINT = '#e4e4e4'
TILES = 3  # to the side of a rank's rows


def block(axis, x: float, y: float, width: float, height: float, colour: str) -> None:
    """A rectangle whose upper left corner is (x, y)."""
    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor='white', lw=1.5))


def stripes(axis, held: tuple[int, ...], along: str, name: str) -> None:
    """Embeddings beside the matrix: those that the rank holds in the colours of their owners."""
    for rank in range(RANKS):
        colour = COLOURS[rank] if rank in held else FAINT
        if along == 'rows':
            block(axis, -0.62, rank, 0.42, 1, colour)
        else:
            block(axis, rank, -0.62, 1, 0.42, colour)
    middle, outside = RANKS / 2, -0.95
    place = (outside, middle) if along == 'rows' else (middle, outside)
    turned = 90 if along == 'rows' else 0
    axis.text(*place, name, rotation=turned, ha='center', va='center', fontsize=9)


def panel(axis, title: str, rows: tuple[int, ...], cols: tuple[int, ...], note: str) -> None:
    """What rank 1 (the second) holds: some rows and columns, and the similarities between them."""
    stripes(axis, rows, 'rows', 'images')
    stripes(axis, cols, 'cols', 'texts')
    for row in range(RANKS):
        for col in range(RANKS):
            held = row in rows and col in cols
            block(axis, col, row, 1, 1, COLOURS[1] if held else FAINT)
    axis.set_title(title, fontsize=11, pad=12)
    axis.text(RANKS / 2, RANKS + 0.25, note, ha='center', va='top', fontsize=9, linespacing=1.4)
    axis.set(xlim=(-1.2, RANKS + 0.2), ylim=(RANKS + 1.4, -1.2), aspect='equal')
    axis.axis('off')


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[2] / 'docs/images/disco.svg'
    parser.add_argument('--out', type=Path, default=default, help='where it is written')
    out = parser.parse_args().out
    plt.rcParams['svg.hashsalt'] = 'disco'  # the same file each time
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 4.6))
    everyone = tuple(range(RANKS))
    panel(
        axes[0],
        'plain DDP',
        (1,),
        (1,),
        'own images and own texts\nanother loss: $b - 1$ negatives\nof $B - 1$',
    )
    panel(
        axes[1],
        'gather everything',
        everyone,
        everyone,
        'all images and all texts\nthe right loss, but every\nrank repeats all $B$ x $B$',
    )
    panel(
        axes[2],
        'DisCo wrapper',
        (1,),
        everyone,
        'own images and all texts\nthe right loss from $b$ x $B$, tile by tile;\n'
        'column sums are combined',
    )
    for part in range(TILES * RANKS + 1):
        axes[2].plot([part / TILES] * 2, [1, 2], color='white', lw=0.6)
    for part in range(TILES + 1):
        axes[2].plot([0, RANKS], [1 + part / TILES] * 2, color='white', lw=0.6)
    figure.tight_layout()
    figure.savefig(out, bbox_inches='tight', metadata={'Date': None})
    print(out)


if __name__ == '__main__':
    main()
