"""How much memory is free on the host."""

from __future__ import annotations

from pathlib import Path


def free_memory() -> tuple[int | None, int]:
    """The bytes of memory that are free here, also by the limit of a container, and all there are; None if unknown."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return None, 0
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that the kernel could forget count as used.
        free, total = min(free, limit - used + int(kept.get("inactive_file", 0))), min(total, limit)
    except (OSError, ValueError):  # no container, or no limit
        pass
    return free, total
