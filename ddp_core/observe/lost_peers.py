"""Telling a lost peer from any other error, and saying who it was."""

from __future__ import annotations

import re
import time
from pathlib import Path

from torch.distributed import DistError

from ddp_core.distributed.world import World
from ddp_core.errors import ExitCode, UserError
from ddp_core.observe.heartbeat import name_lost_peer, sign_again

# gloo raises plain RuntimeErrors; these are the words of its transport.
_WORDS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection failure",
    "timed out waiting",
    "read timeout",
    "wait timeout",
    "timeout waiting",
    "broken pipe",
    "application timeout",
)


_SIGNING_SECONDS = 0.5


class PeersLost(UserError):
    """Another rank is gone or silent, so this one cannot go on."""

    def __init__(self, message: str, exit_code: int = ExitCode.PEERS_LOST) -> None:
        super().__init__(message, exit_code)


def is_peer_loss(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone or silent."""
    if isinstance(error, DistError | PeersLost):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def reason_of(error: BaseException) -> str:
    """What a collective said, in its first line, without the place in gloo's sources and its good wishes."""
    first = str(error).strip().partition("\n")[0].partition(". This is typically caused by")[0]
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\] ?", "", first)


def peers_lost(error: BaseException, directory: Path, world: World, step: int) -> PeersLost:
    """The error for the user: who noticed, at which step, who is likely gone."""
    reason = reason_of(error)
    sign_again(directory, world)
    if "time" in reason.lower():
        # All have stopped at the same step; who is only waiting, like this one, signs again within a moment.
        time.sleep(_SIGNING_SECONDS)
    who = name_lost_peer(directory, world, reason)
    return PeersLost(f"{world.place} lost {who} at step {step} ({reason}); continue with --resume auto")
