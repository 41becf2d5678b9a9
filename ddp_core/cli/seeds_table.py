"""The figures over seeds, as lines of text and as facts for programs."""

from __future__ import annotations

from typing import Any

from ddp_core.record.over_seeds import OverSeeds


def table_over_seeds(found: OverSeeds | None, name: str) -> str | None:
    """A line for each figure: mean ± standard deviation (n), and the interval of the mean; None without two seeds."""
    if found is None:
        return None
    seeds = ", ".join(map(str, found.seeds))
    head = f"{name} over the seeds {seeds}: mean ± standard deviation (n), 95 % interval of the mean"
    if found.left_out:
        head += f"; left out, with other data or other numerics: {found.left_out} runs"
    width = max((len(figure.name) for figure in found.figures), default=0)
    rows = [f"{figure.name.replace('_', ' '):{width}}  {figure.words}  {figure.interval}" for figure in found.figures]
    return "\n".join([head, *rows, ""])


def facts_over_seeds(found: OverSeeds | None) -> dict[str, Any] | None:
    """The same in plain JSON types."""
    if found is None:
        return None
    return {
        "seeds": found.seeds,
        "left_out": found.left_out,
        "figures": {figure.name: figure._asdict() for figure in found.figures},
    }
