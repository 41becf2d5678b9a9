"""Save, find, verify, load and prune checkpoints: plain state dicts in, plain state dicts out.

A checkpoint is a data file written by `torch.save`, or one of each rank, and a manifest beside it; renaming the
manifest commits all of them.
docs/reference/checkpoints.md has the format and the order of the writes; docs/explanation/checkpoints.md says why.
"""

from ddp_core.checkpoint.fence import Fence, Superseded
from ddp_core.checkpoint.loading import (
    Readers,
    best_checkpoint,
    difference,
    find_checkpoints,
    load,
    newest_valid,
    read_checkpoint,
    sweep,
    verify,
)
from ddp_core.checkpoint.manifest import Checkpoint, is_part
from ddp_core.checkpoint.parts import CutTensor, whole_tensors
from ddp_core.checkpoint.ranks import Ranks
from ddp_core.checkpoint.saving import Checkpointer
from ddp_core.checkpoint.state import describe, oversized

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "CutTensor",
    "Fence",
    "Ranks",
    "Readers",
    "Superseded",
    "best_checkpoint",
    "describe",
    "difference",
    "find_checkpoints",
    "is_part",
    "load",
    "newest_valid",
    "oversized",
    "read_checkpoint",
    "sweep",
    "verify",
    "whole_tensors",
]
