"""Draw docs/tree.svg: `python docs/draw_tree.py`. The tree, shares and subtrees are the library's own, not copied."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_core.reduction import Span, canonical_subtrees, share

MICRO_BATCHES = 8
COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]
OWN, SHARED = "#ffffff", "#dddddd"


def nodes(span: Span) -> list[tuple[Span, Span, Span]]:
    """Every inner node under `span` with its children."""
    if span.stop - span.first == 1:
        return []
    half = 1 << ((span.stop - span.first - 1).bit_length() - 1)
    left, right = Span(span.first, span.first + half), Span(span.first + half, span.stop)
    return [(span, left, right), *nodes(left), *nodes(right)]


def place(span: Span) -> tuple[float, float]:
    """Middle of the leaves, height by their number."""
    return (span.first + span.stop - 1) / 2, (span.stop - span.first - 1).bit_length()


def draw(axes: Axes, world_size: int) -> None:
    """One cut of the same tree: what a rank adds up alone in its colour, what ranks add up together in grey."""
    owner = {}
    for rank in range(world_size):
        own = share(MICRO_BATCHES, rank, world_size)
        for span in canonical_subtrees(own.start, own.stop, MICRO_BATCHES):
            for node in [span, *(child for _, *children in nodes(span) for child in children)]:
                owner[node] = rank
    whole = Span(0, MICRO_BATCHES)
    for parent, *children in nodes(whole):
        for child in children:
            (x, y), (up_x, up_y) = place(child), place(parent)
            local = parent in owner
            axes.plot(
                [x, up_x],
                [y, up_y],
                color=COLOURS[owner[child]] if child in owner else "#888888",
                linewidth=1.8,
                linestyle="-" if local else "--",
                zorder=1,
            )
    everything = [whole, *(child for _, *children in nodes(whole) for child in children)]
    for node in everything:
        x, y = place(node)
        colour = COLOURS[owner[node]] if node in owner else SHARED
        axes.scatter([x], [y], s=430, color=colour, edgecolor="#333333", linewidth=0.8, zorder=2)
        text = str(node.first) if y == 0 else "+"
        axes.text(x, y, text, ha="center", va="center", color="black" if node not in owner else OWN, zorder=3)
    for rank in range(world_size):
        own = share(MICRO_BATCHES, rank, world_size)
        axes.text(
            (own.start + own.stop - 1) / 2,
            -0.62,
            f"rank {rank}",
            ha="center",
            va="center",
            color=COLOURS[rank],
            fontsize=10,
        )
    axes.set_title("one process" if world_size == 1 else f"{world_size} ranks", fontsize=11)
    axes.set_xlim(-0.6, MICRO_BATCHES - 0.4)
    axes.set_ylim(-0.9, 3.5)
    axes.axis("off")


def main() -> None:
    """Draw one, two, three and four ranks."""
    matplotlib.rcParams.update({"svg.hashsalt": "tree", "font.family": "sans-serif", "svg.fonttype": "none"})
    figure, grid = plt.subplots(2, 2, figsize=(9, 6))
    for axes, world_size in zip(grid.flat, (1, 2, 3, 4), strict=True):
        draw(axes, world_size)
    figure.suptitle("Eight micro-batches, the same seven additions", fontsize=12)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("tree.svg"), metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
