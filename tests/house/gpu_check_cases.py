"""A list for `make gpu-check` that needs no GPU: `main` works through it as the command does."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_running
from benchmarks.gpu_items import Item, Setting
from benchmarks.gpu_running import Wanted, run

HEAD = {"commit": "0123456789abcdef", "dirty": False, "on": {"device": "none"}, "stand_in": True}


@dataclass(frozen=True)
class Fake:
    """Does what its name says."""

    name: str
    part: str = "fake"
    seconds: float = 0.5
    is_alone: bool = False

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """Take a moment, raise, die or outlast its time."""
        time.sleep(0.03)
        if self.name == "raises":
            raise ValueError("no such thing")
        if self.name == "dies":
            os._exit(3)
        if "outlasts" in self.name:
            time.sleep(seconds)
            return {"outcome": "failed", "code": None, "said": ["did not end"]}
        return {"outcome": "done"}


ITEMS: list[Item] = [Fake("raises"), Fake("dies"), *(Fake(f"item {number}") for number in range(20)), Fake("outlasts")]
LONG: list[Item] = [Fake("outlasts the command", seconds=60), Fake("too late")]


def main(words: Sequence[str]) -> int:
    """Work through a list, into a folder: the `short` one, the `long` one for two seconds, or the `true` one."""
    folder, which = Path(words[0]), words[1]
    if which == "true":
        return gpu_running.check(Wanted(folder), time.monotonic() + 60)
    gpu_running.ENDING_SECONDS, gpu_running.SHORTEST = 0.5, 0.7
    items, seconds = (ITEMS, 60.0) if which == "short" else (LONG, 1.5)
    run(
        items,
        Wanted(folder, jobs=2 if which == "short" else 1),
        Setting(folder, folder, time.monotonic() + seconds, HEAD),
    )
    return 0
