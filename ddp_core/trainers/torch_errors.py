"""What torch's raw errors mean in the user's terms: a note that goes with the exception, beside its traceback.

The note of an exception (`BaseException.add_note`) ends the line that the user reads (`ddp_core.experiment.blame`).
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ddp_core.base.trees import Tree, map_tensors, tensors_of
from ddp_core.observe.step import StepBatch

_OUT_OF_RANGE = re.compile(r"Target (-?\d+) is out of bounds")
_MOST_IDS = 16
_NOTES = {
    "ready only once": "a layer that is checkpointed (torch.utils.checkpoint) is called more than once in a forward: "
    "call checkpoint with use_reentrant=False",
    "out of bounds for storage of size 0": "--shard parameters has given back weights that this backward still needs: "
    "compute a gradient that is differentiated again (a penalty) in the model's forward, not in the loss, or use "
    "--shard gradients",
    "Expected more than 1 value per channel": "batch norm makes no statistic of one sample, and the last micro-batch "
    "of an epoch has what is left: use --set last_batch=drop, or another micro_batch",
}
"""By words of torch's error."""


def note_labels(error: Exception, outputs: Tree, targets: Tree) -> None:
    """Where a label has no class, add what labels and outputs are to the exception of a loss."""
    if _OUT_OF_RANGE.search(str(error)):
        shapes = map_tensors(lambda tensor: list(tensor.shape), outputs)
        error.add_note(
            f"this is a label among the targets, and your model's outputs, of shape {shapes}, have no class for it: "
            "labels go from 0 to the number of classes - 1"
        )


def note_step(error: Exception, batch: StepBatch) -> None:
    """Add what to do to the error of a step; and where a label has no class, the ids of its samples, and the step."""
    for words, note in _NOTES.items():
        if words in str(error):
            error.add_note(note)
    found = _OUT_OF_RANGE.search(str(error))
    if found is None:
        return
    label = int(found[1])
    ids = [
        int(number)
        for numbers, (_, targets) in zip(batch.ids, batch.tensors, strict=True)
        for place, number in enumerate(numbers)
        if any(_has(each[place], label) for each in tensors_of(targets) if each.shape[:1] == (len(numbers),))
    ]
    if ids:
        error.add_note(f"step {batch.step + 1}, sample ids {', '.join(map(str, ids[:_MOST_IDS]))}")


def _has(tensor: Tensor, label: int) -> bool:
    return not tensor.is_floating_point() and bool(torch.any(tensor == label))
