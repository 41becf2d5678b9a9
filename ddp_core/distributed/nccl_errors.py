"""What an error of NCCL means: torch raises all of them as DistBackendError, so only the text tells.

The text has lines: "NCCL error in: FILE, unhandled system error (…), NCCL version …", then what NCCL calls the error,
such as "ncclSystemError: …", then "Last error:" and what happened, then perhaps torch's own stack.
"""

from __future__ import annotations

import re

# Errors of this process alone, unless the text tells of a closed connection. The other two, `ncclSystemError` and
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


def lack_of(text: str) -> str | None:
    """What this machine lacks, according to the text of NCCL's error, and what to do; None where it lacks nothing."""
    if "NCCL" not in text:
        return None
    lack = next((advice for pattern, advice in _LACKS.items() if re.search(pattern, text)), None)
    return None if lack is None else f"{lack} ({last_line(text)})"


def is_own_fault(text: str) -> bool:
    """Whether an error of NCCL is of this process alone, so that no peer is lost."""
    return lack_of(text) is not None or (any(name in text for name in _OWN) and not _CONNECTION.search(text))


def last_line(text: str) -> str:
    """What happened, in one line of the text: the line after "Last error:", else the first line."""
    first = text.strip().partition("\n")[0]
    found = re.search(r"Last error:\s*\n?\s*(\S[^\n]*)", text)
    return first if found is None else found[1].strip()
