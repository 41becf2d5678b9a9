"""Save, find, verify, load and prune checkpoints: plain state dicts in, plain state dicts out.

A checkpoint is a data file written by `torch.save` and a manifest beside it; renaming the manifest commits both.
docs/reference/checkpoints.md has the format and the order of the writes; docs/explanation/checkpoints.md says why.
"""

from ddp_core.checkpoint.fence import Fence, Superseded
from ddp_core.checkpoint.files import POINTS
from ddp_core.checkpoint.manifest import FORMAT, Checkpoint
from ddp_core.checkpoint.reading import (
    best_checkpoint,
    difference,
    find_checkpoints,
    load,
    newest_valid,
    read_checkpoint,
    sweep,
    verify,
)
from ddp_core.checkpoint.saving import Checkpointer
from ddp_core.checkpoint.state import describe

__all__ = [
    "FORMAT",
    "POINTS",
    "Checkpoint",
    "Checkpointer",
    "Fence",
    "Superseded",
    "best_checkpoint",
    "describe",
    "difference",
    "find_checkpoints",
    "load",
    "newest_valid",
    "read_checkpoint",
    "sweep",
    "verify",
]
