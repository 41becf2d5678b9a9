"""What becomes of a file that several processes save to one path at the same time."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WAYS = ("alone", "different", "equal")
LAYERS, VALUES = 16, 64 * 1024


def save_together(rank: int, world_size: int, rounds: int) -> dict[str, dict[str, int]]:
    """All ranks save 4 MB with `torch.save` to one path at once, round by round; counts damaged files, by way.

    `alone`: rank 0 saves and the others do not (the control). `different`: each rank saves other weights. `equal`: all
    save the same. A rank looks at the file as soon as its own save has returned (`at_return`), and rank 0 once more
    after all have finished (`at_end`).
    """
    place = [tempfile.mkdtemp(prefix="ddp-claim-") if rank == 0 else ""]
    dist.broadcast_object_list(place)
    path = Path(place[0]) / "weights.pt"
    found = {}
    for way in WAYS:
        counts = {"rounds": rounds, "at_return": 0, "at_end": 0}
        for _ in range(rounds):
            damaged = _save_and_look(path, rank, way)
            counts["at_return"] += damaged[0]
            counts["at_end"] += damaged[1]
        found[way] = counts
    if rank == 0:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    return found


def _save_and_look(path: Path, rank: int, way: str) -> tuple[int, int]:
    weights = _weights(float(rank + 1) if way == "different" else 1.0)
    together = torch.zeros(2)
    dist.all_reduce(together)
    if rank == 0 or way != "alone":
        torch.save(weights, path)
        together[0] = float(not is_whole(path.read_bytes()))
    dist.all_reduce(torch.zeros(1))
    if rank == 0:
        together[1] = float(not is_whole(path.read_bytes()))
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    return int(together[0]), int(together[1])


def _weights(value: float) -> dict[str, Any]:
    return {str(layer): torch.full((VALUES,), value) for layer in range(LAYERS)}


def is_whole(content: bytes) -> bool:
    """Whether a file can be read and holds what one process saved: every value the same, none of them lost."""
    try:
        weights = torch.load(io.BytesIO(content), weights_only=True)
        values = {float(value) for tensor in weights.values() for value in tensor.unique()}
        return len(weights) == LAYERS and len(values) == 1 and 0.0 not in values
    except Exception:
        return False
