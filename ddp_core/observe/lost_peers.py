"""Tells the loss of a peer from any other error, and names the lost peer."""

from __future__ import annotations

import re
import time
import traceback
from itertools import takewhile
from pathlib import Path

import torch
from torch.distributed import DistError

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.world import World
from ddp_core.observe.heartbeat import name_lost_peer, renew_heartbeat

# gloo raises plain RuntimeErrors; those of a lost peer have one of these phrases of gloo's transport.
_PHRASES = (
    *("connection closed by peer", "connection reset", "connection refused", "connection failure", "broken pipe"),
    *("timed out waiting", "read timeout", "wait timeout", "timeout waiting", "application timeout"),
)
_TORCH, _OURS = Path(torch.__file__).parent, Path(__file__).parents[1]
# Files in which collectives run: ours and torch's own, DDP's forward, and backward, which calls DDP's hooks.
_COLLECTIVES = (
    *(_OURS / place for place in ("distributed", "reduction", "base/torch_internals.py")),
    *(_TORCH / place for place in ("distributed", "nn/parallel/distributed.py", "autograd/graph.py")),
)
_RENEWING_SECONDS = 0.5

# torch raises all errors of NCCL as DistBackendError, so only the text tells. It has lines: "NCCL error in: FILE,
# unhandled system error (…), NCCL version …", then what NCCL calls the error, such as "ncclSystemError: …", then "Last
# error:" and what happened, then perhaps torch's own stack.
# These are of this process alone, unless the text tells of a closed connection. The other two, `ncclSystemError` and
# `ncclRemoteError`, mostly are lost connections.
_OWN = ("ncclUnhandledCudaError", "ncclInvalidArgument", "ncclInvalidUsage", "ncclInternalError")
_CONNECTION = re.compile(r"remote peer|connection|broken pipe|\bpeer\b.*\b(?:exit|gone)", re.IGNORECASE)
_LACKS = {
    "Duplicate GPU detected": "NCCL does not let two ranks share a GPU: use fewer --nproc-per-node, or --backend gloo",
    r"shared memory segment|/dev/shm|posix_fallocate": "NCCL has too little shared memory: give the container more "
    "(docker's --shm-size, Kubernetes' emptyDir with medium Memory)",
    "ibv_reg_mr": "NCCL may not lock the memory that it sends from: raise `ulimit -l` (docker's --ulimit memlock=-1)",
    r"out of memory|CUDA calloc|Cannot allocate memory": "NCCL is out of memory: use a smaller --set micro_batch=N, "
    "--set precision=bf16, or fewer processes on this machine",
    "ncclUnhandledCudaError": "the GPU or its driver has failed: `nvidia-smi` and the kernel's log tell more",
}


class PeersLost(UserError):
    """Another rank is gone or silent, so this rank cannot go on."""

    def __init__(self, message: str, exit_code: int = ExitCode.PEERS_LOST) -> None:
        super().__init__(message, exit_code)


def is_peer_loss(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone or silent."""
    # A RuntimeError's words alone do not tell: a data set may lose the connection to its storage, for example. So it
    # must also come from a file in which collectives run. Errors of torch.distributed's own kind count as lost peers,
    # unless NCCL tells of a fault of this process or its machine.
    if isinstance(error, PeersLost):
        return True
    if isinstance(error, DistError):
        text = str(error)
        names_own = any(name in text for name in _OWN) and not _CONNECTION.search(text)
        return lack_of(text) is None and not names_own
    if not isinstance(error, RuntimeError) or not any(words in str(error).lower() for words in _PHRASES):
        return False
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A mode that looks at torch's operations, and what torch calls it by, stand below the file that calls a collective.
    files = [Path(code.co_filename) for code in takewhile(lambda code: code.co_name != "__torch_dispatch__", codes)]
    while files and files[-1].is_relative_to(_TORCH) and not _runs_collectives(files[-1]):
        files.pop()
    return bool(files) and _runs_collectives(files[-1])


def _runs_collectives(file: Path) -> bool:
    return any(file.is_relative_to(place) for place in _COLLECTIVES)


def lack_of(text: str) -> str | None:
    """What this machine lacks, according to the text of NCCL's error, and what to do; None where it lacks nothing."""
    if "NCCL" not in text:
        return None
    lack = next((advice for pattern, advice in _LACKS.items() if re.search(pattern, text)), None)
    return None if lack is None else f"{lack} ({_last_line(text)})"


def _last_line(text: str) -> str:
    """What happened, in one line of the text: the line after NCCL's "Last error:", else the first line."""
    found = re.search(r"Last error:\s*\n?\s*(\S[^\n]*)", text)
    return text.strip().partition("\n")[0] if found is None else found[1].strip()


def short_message(error: BaseException) -> str:
    """The message of a collective's error in one line, without the place in gloo's sources and gloo's advice."""
    line = _last_line(str(error)).partition(". This is typically caused by")[0]
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\] ?", "", line)


def peers_lost(error: BaseException, directory: Path, world: World, step: int) -> PeersLost:
    """The error for the user: which rank noticed the loss, at which step, and which rank is likely gone."""
    reason = short_message(error)
    renew_heartbeat(directory, world)
    if "time" in reason.lower():
        # In a timeout all ranks stand at the same step. Ranks that only waited, as this one did, renew their heartbeats
        # within a moment.
        time.sleep(_RENEWING_SECONDS)
    who = name_lost_peer(directory, world, reason)
    return PeersLost(f"{world.place} lost {who} at step {step} ({reason}); continue with --resume auto")
