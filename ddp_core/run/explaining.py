"""Why a rehearsal met other bits: the miniature is trained again in other ways, until one of them makes the difference.

Loaded only when a difference was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_core.config.layout import Layout
from ddp_core.run.repeat import Miniature, Repeated, other_bits
from ddp_core.trainers.noting import named
from ddp_core.trainers.operations import first_other_operation

_WAY_OUT = "or go on with --on-difference warn"


def explained(mini: Miniature, layout: Layout, folder: Path, single: Repeated, step: int, names: list[str]) -> str:
    """What a rehearsal has found, in a line: what differs first in which step, what makes it differ, and a way out."""
    found = (
        "one process, killed and resumed, has other weights than one that is not"
        if layout.kind == "single"
        else f"{layout.label} has other weights than one process"
    )
    where = f"first in step {step} of a rehearsal ({named(names)})"
    for cause in _causes(mini, layout, folder, single):
        return f"{found}: {where}. {cause}; {_WAY_OUT}"
    return (
        f"{found}: {where}{_operation(mini, layout, folder, step)}. Something depends on the layout: the code "
        "asks for a rank, a path or the time, or a forward, a hook or a callback keeps something of its own; "
        f"let the result follow from weights, samples and step alone, {_WAY_OUT}"
    )


def _operation(mini: Miniature, layout: Layout, folder: Path, step: int) -> str:
    """The first operation of the step that has another result on the layout than in one process, if that is known."""
    if layout.kind == "dp" or layout.shard == "parameters":  # threads compute, or a part of the weights is gathered
        return ""
    places = [folder / "operations" / name for name in ("alone", "there")]
    for place, where in zip(places, (Layout(device=layout.device), layout), strict=True):
        asked = {"operations_at": step, "clock_ahead": place is places[0]}
        if mini.training(where, place, asked, cuda_graph=False).wait().code:
            return ""
    found = first_other_operation(places[0] / "notes", places[1] / "notes", layout.world_size)
    return f"; there {found} differs first" if found else ""


def _causes(mini: Miniature, layout: Layout, folder: Path, single: Repeated) -> Iterator[str]:
    """What makes the difference, the most telling first, as far as a training in another way shows it."""

    def is_same(name: str, there: Layout = layout, **options: Any) -> bool:
        again = mini.training(there, folder / name, **options).wait()
        return not again.code and other_bits(single, again) is None

    alone = Layout(device=layout.device)
    again = mini.training(alone, folder / "again", workers=0).wait()
    other = other_bits(single, again)
    if again.code or other is not None:
        operation = "" if again.code or other is None else _operation(mini, alone, folder, other[0])
        yield (
            f"One process trained twice has other bits, too{operation}: something draws "
            "from a source of true randomness, reads a clock, or keeps what an earlier run left; let it follow from "
            "weights, samples and step alone"
        )
    if is_same("through"):
        yield (
            "Without the kill and the resume all steps are the same: something that counts is in no checkpoint, such "
            "as an attribute, a global variable or a value in a closure; return it from state_dict or get_extra_state, "
            "or keep it in a buffer"
        )
    if mini.request.options.workers and is_same("loaders", workers=0):
        yield (
            "With --workers 0 all steps are the same: loader processes have a copy of the data set from before "
            "training, and do not see what changes it later, nor share what it keeps"
        )
    if layout.shard != "none" and is_same("whole", layout.model_copy(update={"shard": "none"})):
        yield (
            "Without --shard all steps are the same: something looks at, or writes to, whole weights, gradients or "
            "optimizer state, of which each rank has a part"
        )
