"""Runs in lines of text, for a pipe or a log: what has happened at once, and the progress now and then."""

from __future__ import annotations

import time
from pathlib import Path

from ddp_core.cli.watch.run import WatchedRun
from ddp_core.observe.metrics import duration_text, readable

NOT_FIGURES = ("kind", "time", "step", "epoch")
"""The fields of an evaluation's record that are no figures of it."""


def progress(run: WatchedRun) -> str:
    """How far the run is, in one line."""
    parts = [position(run)]
    if run.loss is not None:
        parts.append(f"loss {run.loss:.4f}")
    parts += readable({name: value for name, value in run.evaluation.items() if name not in NOT_FIGURES})
    if run.checkpoint is not None:
        parts.append(f"checkpoint {run.checkpoint[0]}")
    parts += [*speed(run), *left(run)]
    return "  ".join(parts)


def position(run: WatchedRun) -> str:
    """Where the run is: step 120 of 1200 (10 %)."""
    total = run.total_steps
    return f"step {run.step}" if total is None else f"step {run.step} of {total} ({100 * share(run):.0f} %)"


def share(run: WatchedRun) -> float:
    """The part of its steps that the run has made, 0 where it is not known how many there are."""
    return min(1.0, run.step / run.total_steps) if run.total_steps else 0.0


def speed(run: WatchedRun) -> list[str]:
    """How fast the run is, by the last record of steps."""
    return [] if run.samples_per_second is None else [f"{run.samples_per_second:,.0f} samples/s"]


def left(run: WatchedRun) -> list[str]:
    """How long the run will still go on."""
    return [] if run.seconds_left is None else [f"about {duration_text(run.seconds_left)} left"]


class Lines:
    """Prints lines about runs. A line of progress comes at most every `seconds`, and only where there was progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._said: dict[Path, tuple[float, str]] = {}

    def introduce(self, run: WatchedRun) -> None:
        """Say which run this is, and how it stands."""
        self._print(run, f"{run.record['layout']['label']}, {run.standing()}, {progress(run)}")
        self._said[run.directory.path] = (time.monotonic(), progress(run))

    def tell(self, run: WatchedRun, happened: list[str]) -> None:
        """Say what has happened, and the progress if it is time to."""
        if run.directory.path not in self._said:
            self.introduce(run)
        for text in happened:
            self._print(run, text)
        at, before = self._said[run.directory.path]
        now = time.monotonic()
        is_due = now - at >= self._seconds or (run.is_over and bool(happened))
        if is_due and (text := progress(run)) != before:
            self._print(run, text)
            self._said[run.directory.path] = (now, text)

    def _print(self, run: WatchedRun, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {run.name}: {text}", flush=True)
