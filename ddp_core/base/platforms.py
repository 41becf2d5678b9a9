"""On which operating systems ddp runs, and what differs there. docs/reference/image.md has the whole answer."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

OPEN_FILES = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
"""Where the operating system shows this process's open files by their number."""

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in a unit of getrusage's `ru_maxrss`."""


def refused_platform() -> str | None:
    """Why ddp cannot run on this operating system, and what to do; None where it can."""
    if sys.platform in ("win32", "cygwin"):
        return (
            "ddp does not run on Windows itself, which lacks the file locks and signals that a run relies on: use WSL2 "
            "(`wsl --install`, then as on Linux) or a container"
        )
    return None


def boot_id() -> str:
    """What the processes have in common that share this kernel since it has started; the host's name without Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def free_memory() -> int:
    """The bytes of memory that are free here, also by the limit of a container."""
    if sys.platform != "linux":
        return sys.maxsize  # macOS makes room on its disk when it needs it
    import psutil  # here, because `ddp --help` needs none

    free, group = int(psutil.virtual_memory().available), Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that the kernel could forget count as used.
        free = min(free, limit - used + int(kept.get("inactive_file", 0)))
    return free
