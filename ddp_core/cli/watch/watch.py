"""The command: watch runs until they end, live where there is a terminal, else in lines."""

from __future__ import annotations

import time
from pathlib import Path

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli.watch.finding import Watched
from ddp_core.cli.watch.lines import Lines
from ddp_core.cli.watch.run import WatchedRun
from ddp_core.distributed.reports import tell_user

_LOOK_SECONDS = 1.0


def watch_runs(place: Path, once: bool, seconds: float) -> int:
    """Show the run at `place`, or the runs in that folder; returns the exit code.

    With `once`, show them as they stand and return. Without a terminal, return when no run is at work any more. In a
    terminal the view of a folder goes on and waits for more runs until Ctrl-C. `seconds`: the least time between two
    lines of progress of a run. Raises UserError (2) where there is nothing to watch.
    """
    from rich.console import Console

    console = Console()
    is_live = console.is_terminal and not console.is_dumb_terminal and not once
    problems: list[str] = []
    watched = Watched(place, problems.append)
    if not watched.runs and not (is_live and place.is_dir()):
        for problem in problems:
            _pass_over(problem)
        raise UserError(f"no runs in {place}; train one with `ddp train digits`")
    if console.is_terminal and not console.is_dumb_terminal:
        from ddp_core.cli.watch.view import follow, picture

        if is_live:
            follow(watched, problems, console, _LOOK_SECONDS)
        else:
            console.print(picture(watched.runs, problems, console, whole=True))
    else:
        _follow_in_lines(watched, problems, once, Lines(seconds))
    return _exit_code(watched.runs)


def _follow_in_lines(watched: Watched, problems: list[str], once: bool, lines: Lines) -> None:
    """Print lines until all runs are over; `problems` grows while this looks."""
    for run in watched.runs:
        lines.introduce(run)
    while True:
        while problems:
            _pass_over(problems.pop(0))
        if once or all(run.is_over for run in watched.runs):
            return
        time.sleep(_LOOK_SECONDS)
        for run, happened in watched.look():
            lines.tell(run, happened)


def _pass_over(problem: str) -> None:
    tell_user(f"warning: passed over: {problem}")


def _exit_code(runs: list[WatchedRun]) -> int:
    """0 where each run is completed or goes on, else how the oldest of the others ended: 6 where it was killed."""
    for run in runs:
        if run.state == "interrupted":
            return ExitCode.PEERS_LOST
        if run.state in ("stopped", "failed"):
            return run.record["exit_code"] or ExitCode.INTERNAL
    return ExitCode.DONE
