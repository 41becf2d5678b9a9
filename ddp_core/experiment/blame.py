"""What an exception means to the user: a lack of disk or memory, a mistake in the experiment, or a fault of ours."""

from __future__ import annotations

import re
import traceback
from concurrent import futures
from pathlib import Path

import torch
from torch.distributed import DistError

from ddp_core.base.errors import ExitCode, UserError, internal
from ddp_core.base.refusals import refusal
from ddp_core.base.user_code import LeftEarly, RaisedElsewhere, told, users
from ddp_core.observe.lost_peers import lack_of

# Threads of ours call the user's code through concurrent.futures.
_NOT_USERS = tuple(f"{Path(file).parent}/" for file in (Path(__file__).parent, torch.__file__, futures.__file__))
_NOT_REPEATED = re.compile(r"(\w+) does not have a deterministic implementation")
"""How torch.use_deterministic_algorithms refuses an operation (at::Context::alertNotDeterministic)."""


def shortage(error: BaseException, speaker: str) -> UserError | None:
    """The UserError (4) where the system refuses something, such as disk or memory; None for any other exception.

    It is one whoever's code has met a lack. Any other refusal that the user's code meets is the user's.
    """
    if isinstance(error, DistError) and (lack := lack_of(str(error))):
        return UserError(f"{speaker}: {lack}", ExitCode.RESOURCES)
    known = refusal(error)
    return None if known is None else UserError(f"{speaker}: {known}", known.exit_code)


def unforeseen(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the line for any other exception: 2 where the user's code raised it, 70 where ours did."""
    if isinstance(error, LeftEarly | RaisedElsewhere):
        return ExitCode.BAD_INPUT, str(error)
    if found := _NOT_REPEATED.match(str(error)):
        place = told(error).partition("RuntimeError: ")[0]
        return ExitCode.BAD_INPUT, (
            f"{place}{found[1]}: this operation has no kernel here that repeats its bits; use "
            "another layer in the model (nn.AvgPool2d of a fixed size for an adaptive one), or do without the same "
            "bits: --reduction plain --deterministic never"
        )
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else ""
    # A reduction refuses the user's model by a ValueError or RuntimeError of its own.
    is_refusal = isinstance(error, ValueError | RuntimeError) and module.startswith("ddp_core.reduction.")
    if users(error) or is_refusal:
        from ddp_core.experiment.layers import layer_of

        layer = layer_of(error)
        return ExitCode.BAD_INPUT, told(error) + (f"; in {layer}" if layer else "")
    return ExitCode.INTERNAL, internal(error)


def users_trace(error: BaseException) -> str:
    """The traceback without the frames of this program and of torch; empty where it says no more than `unforeseen`.

    That names the last frame and the layer: no way from one forward to the next leads to anything else.
    """
    whole = traceback.TracebackException.from_exception(error)
    chain = [whole]
    for each in chain:
        each.stack[:] = [frame for frame in each.stack if not frame.filename.startswith(_NOT_USERS)]
        chain += [other for other in (each.__cause__, each.__context__) if other is not None]
    is_told = chain == [whole] and all(frame.name == "forward" for frame in whole.stack[:-1])
    return "".join(whole.format()) if whole.stack and not is_told else ""
