"""Draw docs/tree.svg: `python docs/draw_tree.py`. The tree, its cuts and its subtrees are the library's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_core.base.seeds import share_of
from ddp_core.reduction import Span, canonical_subtrees

MICRO_BATCHES = 8
COLORS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]
LOOK: dict[Any, Any] = {"svg.hashsalt": "tree", "font.family": "sans-serif", "svg.fonttype": "none"}


def family(span: Span) -> Iterator[Span]:
    """`span`, and every node of the tree below it."""
    yield span
    for child in children(span):
        yield from family(child)


def children(span: Span) -> list[Span]:
    """The two nodes whose sums are added to give that of `span`; none for a leaf."""
    if span.stop - span.first == 1:
        return []
    left = canonical_subtrees(span.first, span.stop - 1, MICRO_BATCHES)[0]
    return [left, Span(left.stop, span.stop)]


def place(span: Span) -> tuple[float, float]:
    """Where a node is drawn: in the middle of its leaves, the higher the more there are."""
    return (span.first + span.stop - 1) / 2, (span.stop - span.first - 1).bit_length()


def draw(axes: Axes, world_size: int) -> None:
    """The tree, cut for so many ranks: what a rank adds up alone in its colour, what ranks add up together in grey."""
    owner: dict[Span, int] = {}
    for rank in range(world_size):
        own = share_of(MICRO_BATCHES, rank, world_size)
        for subtree in canonical_subtrees(own.start, own.stop, MICRO_BATCHES):
            owner |= dict.fromkeys(family(subtree), rank)
        middle = (own.start + own.stop - 1) / 2
        axes.text(middle, -0.62, f"rank {rank}", ha="center", va="center", color=COLORS[rank], fontsize=10)
    for node in family(Span(0, MICRO_BATCHES)):
        x, y = place(node)
        for child in children(node):
            low, high = place(child), (x, y)
            color = COLORS[owner[child]] if child in owner else "#888888"
            sent = "-" if node in owner else "--"
            axes.plot(*zip(low, high, strict=True), color=color, linewidth=1.8, linestyle=sent, zorder=1)
        alone = node in owner
        axes.scatter(
            x, y, s=430, color=COLORS[owner[node]] if alone else "#dddddd", edgecolor="#333333", lw=0.8, zorder=2
        )
        label = "+" if y else str(node.first)
        axes.text(x, y, label, ha="center", va="center", color="white" if alone else "black", zorder=3)
    axes.set_title("one process" if world_size == 1 else f"{world_size} ranks", fontsize=11)
    axes.set_xlim(-0.6, MICRO_BATCHES - 0.4)
    axes.set_ylim(-0.9, 3.5)
    axes.axis("off")


@mpl.rc_context(LOOK)
def main() -> None:
    """Draw the tree for one, two, three and four ranks."""
    figure = Figure(figsize=(9, 6), layout="tight")
    for axes, world_size in zip(figure.subplots(2, 2).flat, (1, 2, 3, 4), strict=True):
        draw(axes, world_size)
    figure.suptitle("Eight micro-batches, the same seven additions", fontsize=12)
    figure.savefig(Path(__file__).with_name("tree.svg"), metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
