"""A share of a core for one process, by a control group of a test's own; skipped where this process may make none."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_GROUPS = Path("/sys/fs/cgroup")
_PERIOD = 100_000
"""Microseconds after which a process may compute again."""


@contextlib.contextmanager
def throttled(pid: int, share: float) -> Iterator[None]:
    """The process has `share` of one core until the block ends."""
    first = (_GROUPS / "cpu").is_dir()  # version 1 of control groups
    above = _GROUPS / "cpu" if first else _GROUPS
    group = above / f"ddp-test-{uuid.uuid4().hex[:8]}"
    quota = round(share * _PERIOD)
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make a control group")
    try:
        try:
            if first:
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"needs a control group that limits processors ({error.strerror})")
        yield
    finally:
        with contextlib.suppress(OSError):
            (above / "cgroup.procs").write_text(str(pid))
        group.rmdir()
