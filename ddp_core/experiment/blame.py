"""What an exception means to the user: a lack of disk or memory, a mistake in the experiment, or a fault of ours."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch.distributed import DistError

from ddp_core.base.errors import ExitCode, UserError, internal, is_full, no_room
from ddp_core.base.user_code import LeftEarly, users
from ddp_core.distributed.nccl_errors import lack_of
from ddp_core.experiment.file import MODULE_PREFIX

# Where memory runs out, threads and libraries raise RuntimeErrors that quote the first error.
_OUT_OF_MEMORY = re.compile(
    r"(?:DefaultCPUAllocator|CUDA out of memory|CUDA error: out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED)[^\n]*"
)
_ON_CPU = "use a smaller --set micro_batch=N, fewer processes on this machine, or a machine with more memory"
_ON_CUDA = (
    "use a smaller --set micro_batch=N (more of them make up the same global batch), --set precision=bf16, and where "
    "it happened in an evaluation a smaller --set evaluation.samples_per_batch=N"
)


def shortage(error: BaseException, speaker: str, directory: Path) -> UserError | None:
    """The UserError (4) where disk, memory, shared memory or a device is lacking; None for any other exception."""
    if is_full(error):
        return no_room(directory, error)
    text = str(error)
    if isinstance(error, DistError) and (lack := lack_of(text)):
        return UserError(f"{speaker}: {lack}", ExitCode.RESOURCES)
    found = _OUT_OF_MEMORY.search(text)
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not (isinstance(error, RuntimeError) and found):
        return None
    line = found[0] if found is not None else text.strip().partition("\n")[0]
    reason = line.partition(". GPU ")[0].removeprefix("DefaultCPUAllocator: ")
    on_cuda = isinstance(error, torch.OutOfMemoryError) or reason.lower().startswith("cu")
    return UserError(
        f"{speaker}: out of memory{f' ({reason})' if reason else ''}; {_ON_CUDA if on_cuda else _ON_CPU}",
        ExitCode.RESOURCES,
    )


def unforeseen(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the line for any other exception: 2 where the user's code raised it, 70 where ours did."""
    if isinstance(error, LeftEarly):
        return ExitCode.BAD_INPUT, str(error)
    if users(error) or _is_refusal(error):
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        return ExitCode.BAD_INPUT, f"{_place_in_experiment(error)}{type(error).__name__}: {error}{notes}"
    return ExitCode.INTERNAL, internal(error)


def _is_refusal(error: BaseException) -> bool:
    """Whether a reduction refuses the user's model: it does so by a ValueError or RuntimeError of its own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return isinstance(error, ValueError | RuntimeError) and module.startswith("ddp_core.reduction.")


def _place_in_experiment(error: BaseException) -> str:
    """'file:line: ' of the exception's deepest point in the experiment's own file; empty where it has none there."""
    places = [
        f"{frame.f_code.co_filename}:{line}: "
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(MODULE_PREFIX)
    ]
    return places[-1] if places else ""
