"""Ranks that `ddp` does not launch itself: forked from a server that has torch loaded, so quick to start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.commands import Ended
from tests.support.processes import run_processes

Prepare = Callable[[int], None]


def run_workers(words: list[str], ranks: int, prepare: Prepare | None = None) -> list[Ended]:
    """Run `ddp WORDS` as every rank of an outside launcher; return how each ended.

    `prepare(rank)` runs in each rank's process before the command.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-test-") as scratch:
        codes = run_processes(_work, ranks, words, scratch, prepare)
        said = [[(Path(scratch) / f"{name}-{rank}").read_text() for name in ("out", "err")] for rank in range(ranks)]
    return [Ended(code, output, errors) for code, (output, errors) in zip(codes, said, strict=True)]


def _work(rank: int, world_size: int, words: list[str], scratch: str, prepare: Prepare | None) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{scratch}/{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    if prepare is not None:
        prepare(rank)
    from ddp_core.cli import main

    return main(words)
