"""Puts the stand-in into a process, and into those that it starts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

VARIABLE = "DDP_STANDIN_CUDA"
"""Environment variable: so many devices are played in this process."""
ROOT = Path(__file__).parents[3]


def environment(count: int = 1) -> dict[str, str]:
    """The variables with which an interpreter that is started anew plays `count` devices."""
    return {VARIABLE: str(count), "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "site"), str(ROOT)])}


def install(count: int = 1) -> None:
    """Play `count` devices in this process, for the rest of its life; a second call only changes their number.

    Raises RuntimeError where torch finds a real one.
    """
    import torch

    from tests.support.standin_cuda.devices import generator_of, replace_devices
    from tests.support.standin_cuda.groups import replace_groups
    from tests.support.standin_cuda.operations import Watch
    from tests.support.standin_cuda.tensors import replace_tensors
    from tests.support.standin_cuda.world import WORLD

    if WORLD.memory:
        WORLD.begin(count)
        cuda: Any = torch.cuda
        cuda.default_generators = tuple(generator_of(torch.device("cuda", each)) for each in range(count))
        return
    if torch.cuda.is_available():
        raise RuntimeError("there is a real CUDA device here: nothing may stand in for it")
    WORLD.begin(count)
    replace_devices()
    replace_tensors()
    replace_groups()
    _watch_threads(Watch)
    WORLD.here.is_watched = True
    Watch().__enter__()  # type: ignore[no-untyped-call]


def _watch_threads(watch: Any) -> None:
    """Every thread that begins from here on watches its operations."""
    from tests.support.standin_cuda.world import WORLD

    thread: Any = threading.Thread
    begin = thread._bootstrap_inner

    def watched(self: threading.Thread) -> None:
        WORLD.here.is_watched = True
        with watch():
            begin(self)

    thread._bootstrap_inner = watched
