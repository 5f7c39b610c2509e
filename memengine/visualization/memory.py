"""Pictures of where memory went: over a step, and at its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from memengine.visualization.figures import figure_of, save_figure

_MIB = 2**20
_COLUMNS = 1000  # of the picture; what lies in one is drawn at its highest moment
_COLOURS = {
    'parameters': '#1d3557',
    'teacher': '#457b9d',
    'buffers': '#a8dadc',
    'optimiser state': '#6d597a',
    'gradients': '#b56576',
    'batch': '#8d99ae',
    'saved activations': '#e09f3e',
    'transients': '#f4d58d',
    'workspaces': '#99bf8f',
    'allocator': '#d9d9d9',
}


def draw_memory(live: Mapping[str, Sequence[int]], peak: int, label: str, path: str | Path) -> None:
    """Draw the memory of a step over its course, by what it is for, with its peak marked.

    Args:
        live: As of :class:`memengine.memory.Timeline`: bytes by category at each moment.
        peak: The index of the peak.
        label: What is written beside the peak.
        path: The PNG.
    """
    categories = [name for name in _COLOURS if any(live.get(name, ()))]
    totals = [sum(values) for values in zip(*(live[name] for name in categories), strict=True)]
    shown = _highest(totals)
    figure, [[axis]] = figure_of(1, 1, width=10, height=4.5)
    axis.stackplot(
        shown,
        [[live[name][moment] / _MIB for moment in shown] for name in categories],
        labels=categories,
        colors=[_COLOURS[name] for name in categories],
        linewidth=0,
    )
    most = totals[peak] / _MIB
    axis.set(
        xlabel='memory made and freed, one after another',
        ylabel='MiB',
        xlim=(0, len(totals) - 1),
        ylim=(0, 1.25 * most),
    )
    is_left = peak < len(totals) / 2
    axis.annotate(
        f'{most:,.1f} MiB: {label}',
        (peak, most),
        xytext=(0.02 if is_left else 0.98, 0.93),
        textcoords='axes fraction',
        ha='left' if is_left else 'right',
        fontsize=9,
        arrowprops=dict(arrowstyle='->', color='0.3'),
    )
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc='outside right center', fontsize=8, frameon=False)
    axis.spines[['top', 'right']].set_visible(False)
    save_figure(figure, path)


def draw_plans(
    tried: Sequence[tuple[float, int, str]],
    front: Sequence[tuple[float, int, str]],
    limit_bytes: int,
    path: str | Path,
) -> None:
    """Draw plans by time and bytes: all of them as dots, those that no other beats as steps.

    Args:
        tried: Times as shares of the plain step's, bytes at the peak, and what is switched on.
        front: The same of those that no other beats in both, the fastest first.
        limit_bytes: What the peak may be at most.
        path: The PNG.
    """
    figure, [[axis]] = figure_of(1, 1, width=8, height=5)
    axis.scatter(
        [nbytes / _MIB for _, nbytes, _ in tried],
        [times for times, _, _ in tried],
        s=12,
        color='0.7',
        label='tried',
    )
    # Less memory than a plan's takes the time of the next leaner one.
    axis.step(
        [nbytes / _MIB for _, nbytes, _ in front],
        [times for times, _, _ in front],
        where='pre',
        marker='o',
        color='#1d3557',
        label='none is both leaner and faster',
    )
    for times, nbytes, label in front:
        axis.annotate(
            label, (nbytes / _MIB, times), xytext=(4, 4), textcoords='offset points', fontsize=6
        )
    axis.axvline(limit_bytes / _MIB, color='#b56576', linestyle='--', label='limit')
    axis.set(xlabel='MiB at the peak, predicted', ylabel='time, the step as it is = 1')
    axis.legend(frameon=False, fontsize=8)
    axis.spines[['top', 'right']].set_visible(False)
    save_figure(figure, path)


def _highest(totals: Sequence[int]) -> list[int]:
    """The highest moment of each of so many stretches as a picture has columns."""
    width = max(len(totals) // _COLUMNS, 1)
    return [
        max(range(start, min(start + width, len(totals))), key=totals.__getitem__)
        for start in range(0, len(totals), width)
    ]
