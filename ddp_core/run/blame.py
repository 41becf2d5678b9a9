"""What an exception means to the user: a lack of disk or memory, a mistake in the experiment, or a fault of ours."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from ddp_core.errors import ExitCode, UserError, internal, is_full, no_room
from ddp_core.run.experiment_file import MODULE_PREFIX

_PACKAGE = Path(__file__).parents[1]
# Our files that call the experiment's code, or hold code of ours in its place: models, data sets, losses, optimizers,
# metrics, callbacks, scripted faults.
_CALLS_EXPERIMENT = (
    "data",
    "faults.py",
    "model",
    "observe/step.py",
    "run/building.py",
    "run/experiment_file.py",
    "trainers/callbacks.py",
    "trainers/evaluation.py",
    "trainers/named_sums.py",
    "trainers/passes.py",
    "trainers/updating.py",
)
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def shortage(error: BaseException, speaker: str, directory: Path) -> UserError | None:
    """The UserError (4) where disk or memory ran out; None for any other exception."""
    if is_full(error):
        return no_room(directory, error)
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    ):
        return None
    reason = str(error).strip().partition("\n")[0].partition(". GPU ")[0].rpartition("DefaultCPUAllocator: ")[2]
    return UserError(
        f"{speaker}: out of memory{f' ({reason})' if reason else ''}; use a smaller --set micro_batch=N, "
        "fewer processes on this machine, or a machine with more memory",
        ExitCode.RESOURCES,
    )


def unforeseen(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the line for any other exception: 2 where the experiment raised it, 70 where we did."""
    if is_experiments(error):
        place = _place_in_experiment(error)
        return ExitCode.BAD_INPUT, f"{place}{type(error).__name__}: {error}"
    return ExitCode.INTERNAL, internal(error)


def is_experiments(error: BaseException) -> bool:
    """Whether the experiment's code raised the exception: the last file of ours in the traceback tells.

    A reduction's ValueError or RuntimeError counts as the experiment's: it says what cannot be reduced in its model.
    """
    places = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [place.relative_to(_PACKAGE) for place in places if place.is_relative_to(_PACKAGE)]
    if not ours:
        return False
    refused = ours[-1].is_relative_to("reduction") and isinstance(error, ValueError | RuntimeError)
    return refused or any(ours[-1].is_relative_to(place) for place in _CALLS_EXPERIMENT)


def _place_in_experiment(error: BaseException) -> str:
    """'file:line: ' of the exception's deepest point in the experiment's own file; nothing where it never was there."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(MODULE_PREFIX)
    ]
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}: " if frames else ""
