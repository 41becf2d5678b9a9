"""Contenders in processes of their own that take turns, so that what disturbs the machine disturbs all of them.

Only ratios within one run are worth reporting: each is a contender's time divided by that of another, the first if
nothing else is said, in the same round, as the median over the rounds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

Seconds = dict[str, float]
Turn = Callable[[], Seconds]
"""One turn of a contender: seconds per step by kind of measurement."""


def take_turns(
    contenders: Mapping[str, tuple[Callable[..., Turn], Sequence[Any]]], rounds: int
) -> dict[str, list[Seconds]]:
    """Each contender's turns, by name: `build(*arguments)` makes its turn in a new process, with one thread.

    The order within a round rotates. A first, unrecorded round warms every process up.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    lines: dict[str, Connection] = {}
    for name, (build, arguments) in contenders.items():
        lines[name], theirs = context.Pipe()
        # Not a daemon, which could not start loader workers of its own. It ends when its line is closed.
        process = context.Process(target=_answer, args=(theirs, build, arguments), name=name)
        process.start()
        theirs.close()
        processes.append(process)
    try:
        _round(lines, list(lines))
        seconds: dict[str, list[Seconds]] = {name: [] for name in lines}
        for turn in range(rounds):
            for name, answer in _round(lines, rotated(lines, turn)).items():
                seconds[name].append(answer)
        return seconds
    finally:
        for line in lines.values():
            line.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def rotated(names: Iterable[str], turn: int) -> list[str]:
    """The names in the order of this turn: in each turn another name begins."""
    names = list(names)
    first = turn % len(names)
    return names[first:] + names[:first]


def _round(lines: Mapping[str, Connection], names: Sequence[str]) -> dict[str, Seconds]:
    answers = {}
    for name in names:
        lines[name].send("go")
        answer = lines[name].recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{name}: {answer}")
        answers[name] = answer
    return answers


def _answer(line: Connection, build: Callable[..., Turn], arguments: Sequence[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):  # noqa: PTH123
        try:
            turn = build(*arguments)
            with contextlib.suppress(EOFError):
                while line.recv():
                    line.send(turn())
        except Exception as error:
            line.send(f"{type(error).__name__}: {error}")
            sys.exit(1)


def best_bare(seconds: Mapping[str, Sequence[Seconds]]) -> str:
    """The bare loop with the least median time, of all contenders whose name begins with "bare"."""
    loops = [name for name in seconds if name.startswith("bare")]
    return min(loops, key=lambda name: median(turn["step"] for turn in seconds[name]))


def summary(
    seconds: Mapping[str, Sequence[Seconds]], kind: str = "step", base: str | None = None
) -> dict[str, dict[str, float]]:
    """Per contender: median microseconds, and the median and quartiles of its ratio to `base`, by default the first.

    `fastest` is the ratio of the fastest turns, which other work disturbed least.
    """
    against = seconds[base or next(iter(seconds))]
    result = {}
    for name, turns in seconds.items():
        ratios = [ours[kind] / theirs[kind] for ours, theirs in zip(turns, against, strict=True)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        times = [1e6 * turn[kind] for turn in turns]
        result[name] = {"microseconds": median(times), "ratio": median(ratios), "low": low, "high": high}
        result[name]["fastest"] = min(times) / min(1e6 * turn[kind] for turn in against)
    return result
