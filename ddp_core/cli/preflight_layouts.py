"""Which layouts `ddp rehearse` tries: the one that was asked for, as far as it fits, and all others that fit here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.config.cut import BatchCut
from ddp_core.config.layout import DeviceType, Layout, LayoutKind, ShardMode
from ddp_core.experiment.request import Request

Attempts = list[dict[str, Any]]
"""The options of each `ddp train` that makes up one run: all but the last are killed, and the next one resumes."""


def layouts_to_try(
    request: Request, modes: Sequence[ShardMode], places: int, steps: int
) -> tuple[Layout, dict[str, Attempts], list[str]]:
    """The layout asked for or the nearest to it that fits, the attempts by title (its own first), and notes.

    `modes`: the shard modes that the experiment can have. `places`: how many ranks or replicas fit this machine.
    `steps`: how many each run trains. With the plain reduction, which promises nothing between layouts, only the one
    asked for is tried.
    """
    wanted = request.layout
    own = _fitting(request, places)
    notes = [] if own == wanted else [f"{wanted.label} does not fit this machine: {own.label} was tried in its place"]
    tried = [own]
    if request.options.reduction == "exact":
        others = [Layout(device=wanted.device), *(_two(wanted.device, kind) for kind in ("dp", "ddp"))]
        others += [_two(wanted.device, "ddp", mode) for mode in modes]
        fitting = [each for each in others if each.shares <= places and _can_share(request, each)]
        tried += [layout for layout in fitting if layout != own]
    attempts = {layout.label: [_options(layout)] for layout in tried}
    killed = next((layout for layout in tried if layout.world_size > 1), own)
    # Any other layout may continue an exact run; a plain one has its bits on its own layout alone.
    resumed = next((layout for layout in tried if layout.kind != killed.kind), killed)
    attempts[f"{killed.label}, killed, then {resumed.label}"] = [
        _options(killed) | {"faults": (f"kill@{steps}",)},
        _options(resumed) | {"resume": "auto"},
    ]
    return own, attempts, notes


def _two(device: DeviceType, kind: LayoutKind, mode: ShardMode = "none") -> Layout:
    return Layout(kind=kind, device=device, nproc_per_node=2, shard=mode)


def _fitting(request: Request, places: int) -> Layout:
    """The layout that was asked for; where it has several nodes, as much of it as fits this one."""
    wanted = request.layout
    if wanted.nnodes == 1:
        return wanted
    for count in range(min(places, wanted.shares), 1, -1):
        layout = wanted.model_copy(update={"nnodes": 1, "nproc_per_node": count})
        if _can_share(request, layout):
            return layout
    return Layout(device=wanted.device)


def _can_share(request: Request, layout: Layout) -> bool:
    """Whether the global batch can be cut for this layout, with work for each rank or replica."""
    try:
        return layout.shares <= BatchCut.of(request.loaded.experiment, layout).micro_batches
    except UserError:
        return False


def _options(layout: Layout) -> dict[str, Any]:
    chosen: dict[str, Any] = {"layout": layout.kind, "device": layout.device, "shard": layout.shard}
    if layout.kind != "single":
        chosen["nproc_per_node"] = layout.nproc_per_node
    return chosen | ({"cuda_graph": False} if layout.kind == "dp" else {})
