"""The memory that is free on the host, or in a container that has a limit of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ddp_core.base import platforms

GIB = 2**30
STAT = f"anon 1\ninactive_file {GIB}"


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, None, 6 * GIB),
        ("max", 3 * GIB, 6 * GIB),
        (4 * GIB, 3 * GIB, 2 * GIB),
        (16 * GIB, 3 * GIB, 6 * GIB),
    ],
    ids=["no container", "no limit", "a limit, and a file that the kernel could forget", "more than the host has"],
)
def test_what_is_free_is_the_less_of_host_and_container(
    limit: object, used: object, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    monkeypatch.setattr(platforms, "Path", lambda path: tmp_path / Path(path).name)
    if limit is not None:
        (tmp_path / "cgroup").mkdir()
        for name, content in (("memory.max", limit), ("memory.current", used), ("memory.stat", STAT)):
            (tmp_path / "cgroup" / name).write_text(f"{content}\n")
    assert platforms.free_memory() == expected
