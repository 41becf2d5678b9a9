"""Which runs are watched: one, or those of a folder that somebody works on, also such as begin later."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ddp_core.base.errors import UserError
from ddp_core.base.files import is_there
from ddp_core.cli.watch.run import WatchedRun
from ddp_core.record.directory import RunDirectory

_SEARCH_SECONDS = 5.0


def is_run(place: Path) -> bool:
    """Whether the place is a run directory, perhaps one whose record is bad or not written yet."""
    return is_there(place / "run.json") or is_there(place / "checkpoints")


class Watched:
    """The runs at `place`, a run directory or a folder of them, that are shown, oldest first.

    Of a folder these are the runs that are not over; if all are over when the watching begins, the newest one. A run
    that ends while it is watched stays. `on_bad` is called for each directory with a bad record, with the line that
    says what is wrong. Raises UserError (2) for a run directory with a bad record.
    """

    def __init__(self, place: Path, on_bad: Callable[[str], None]) -> None:
        self.place = place
        self.runs: list[WatchedRun] = []
        self._on_bad = on_bad
        self.is_run = is_run(place)
        """Whether one run directory is watched, and not a folder of them."""
        self._seen: dict[Path, tuple[int, int]] = {}
        """The run directories that were looked at, and which file their record was then."""
        self._next_search = 0.0
        if self.is_run:
            self.runs = [WatchedRun(RunDirectory(place))]
        elif newest := self._search(all_are_wanted=True):
            self.runs = [run for run in newest if not run.is_over] or newest[-1:]
        for run in self.runs:
            run.look()

    def look(self) -> list[tuple[WatchedRun, list[str]]]:
        """Look at each run, and for new ones; returns what has happened in each run, for a new one nothing.

        Raises UserError (2) where the only run that is watched has lost its record.
        """
        found: list[tuple[WatchedRun, list[str]]] = []
        for run in list(self.runs):
            try:
                found.append((run, run.look()))
            except UserError as error:
                if self.is_run:
                    raise
                self.runs.remove(run)
                self._on_bad(str(error))
        if not self.is_run and time.monotonic() >= self._next_search:
            known = {run.directory.path for run in self.runs}
            new = [run for run in self._search() if run.directory.path not in known]
            for run in new:
                run.look()
                found.append((run, []))
            self.runs = sorted([*self.runs, *new], key=_started)
        return found

    def _search(self, all_are_wanted: bool = False) -> list[WatchedRun]:
        """The runs whose record is new since the last search and that are not over, or also those; oldest first."""
        self._next_search = time.monotonic() + _SEARCH_SECONDS
        found: list[WatchedRun] = []
        # The folder of all runs has a folder for each experiment.
        for file in (*self.place.glob("*/run.json"), *self.place.glob("*/*/run.json")):
            try:
                status = file.stat()
            except OSError:
                continue
            known = (status.st_mtime_ns, status.st_ino)
            if self._seen.get(file.parent) == known:
                continue
            self._seen[file.parent] = known
            try:
                run = WatchedRun(RunDirectory(file.parent))
            except UserError as error:
                self._on_bad(str(error))
                continue
            if all_are_wanted or not run.is_over:
                found.append(run)
        return sorted(found, key=_started)


def _started(run: WatchedRun) -> tuple[str, Path]:
    return run.record["attempts"][-1]["started_at"], run.directory.path
