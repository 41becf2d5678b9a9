"""`ddp watch`: what run directories tell while others write them, as a live table or in lines; needs no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ddp_core.base.beneath import open_file
from ddp_core.base.documents import BadDocument, parse_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_there
from ddp_core.base.platforms import boot_id
from ddp_core.base.shown import shown, shown_in
from ddp_core.distributed.processes import state_of
from ddp_core.observe.heartbeat import Beat, read_heartbeats
from ddp_core.observe.metrics import MetricsRecord, duration_text, readable
from ddp_core.record.directory import RunDirectory, find_runs, pass_over
from ddp_core.record.lock import is_held
from ddp_core.record.recorded import how_it_ended

_LOOK_SECONDS, _LOOKS_PER_SEARCH, _MOST_RANKS, _END_BYTES = 1.0, 5, 8, 2**18
SILENT_SECONDS = 15.0
"""After so long without a step, it is said that there was none; a run of long steps may be silent for three of them."""


class WatchedRun:
    """One run as it stands, by the ends of its files. Raises UserError (2) without a readable record."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory, self.step, self.seconds_per_step = directory, 0, 0.0
        self.last: dict[str, Any] = {}
        """The last record of each kind in metrics.jsonl."""
        try:
            is_worked_in = is_held(self.directory.path, patience=0.0)
        except OSError:  # somebody else's run, whose lock may not be opened
            is_worked_in = False
        beats = read_heartbeats(self.directory.path)
        # A run writes how it has ended before it gives its lock back, so its record is read after the lock.
        self.record = self.directory.read()
        self.name = shown(f"{self.record['experiment']['name']}/{self.directory.path.name}")
        self._read_metrics()
        if self.record["status"] == "running" and beats:  # heartbeats come more often than records of long steps
            self.step = max(self.step, beats[0]["step"])
        lines = [shown(line.decode(errors="replace")) for line in _last_lines(self.directory.log)]
        self.warnings = [line for line in lines if "warning: " in line]
        self.ranks = [self._rank(beat) for beat in beats]
        signs = (self.directory.path / "run.json", self.directory.metrics)
        self.silent_seconds = min(*map(_age, signs), *(rank["age"] for rank in self.ranks))
        self.state = self._state(is_worked_in)
        self.is_over = self.state not in ("starting", "running", "silent")

    def _rank(self, beat: Beat) -> dict[str, Any]:
        # Nothing is known of the processes of other machines and containers.
        is_here = (beat["host"], beat.get("boot")) == (socket.gethostname(), boot_id())
        own = beat.get("mean_seconds")
        age = _age(self.directory.path / "heartbeats" / f"rank-{beat['rank']}.json")
        process = state_of(beat["pid"]) if is_here else "running"
        return {**beat, "own": own if isinstance(own, float) else 0.0, "age": age, "process": process}

    def _state(self, is_worked_in: bool) -> str:
        """How it stands. A run that was killed counts as silent until nobody can be expected to start it again."""
        if self.record["status"] != "running":
            return self.record["status"]
        can_return = self.record["layout"]["kind"] == "ddp"
        timeout = dict[str, Any](self.record["options"]).get("timeout")
        patience = SILENT_SECONDS + can_return * (timeout if isinstance(timeout, int | float) else 60.0)
        is_dead = not is_worked_in and any(rank["process"] == "gone" for rank in self.ranks)
        if (is_dead and not can_return) or (not is_worked_in and self.silent_seconds > patience):
            return "interrupted"
        if is_dead or self.silent_seconds > max(SILENT_SECONDS, 3 * self.seconds_per_step):
            return "silent"
        return "running" if self.step or self.ranks else "starting"

    def standing(self) -> str:
        """The state in words, with its reason."""
        message = self.record["message"]
        if self.state == "silent":
            lost = [rank for rank in self.ranks if rank["process"] != "running"]
            words = [f", rank {rank['rank']} is {rank['process']}" for rank in lost]
            return f"no step for {self.silent_seconds:.0f} s{''.join(words)}"
        if self.state == "interrupted":
            return f"interrupted at step {self.step}: its processes are gone; `ddp train` with --resume continues it"
        if self.state == "completed":
            early = how_it_ended(self.record)
            done = f"completed after {self.record['result'].get('steps')} steps" + (f", {early}" if early else "")
            return f"{done}, weights {(self.record['weights_sha256'] or '')[:12]}"
        return f"{self.state}: {message}" if self.state in ("stopped", "failed") and message else self.state

    def _read_metrics(self) -> None:
        timed: list[tuple[float, int]] = []
        for line in _last_lines(self.directory.metrics):
            with contextlib.suppress(BadDocument):
                record = shown_in(parse_document(line, MetricsRecord))
                self.last[record["kind"]], self.step = record, record["step"]
                if record["kind"] == "resume":
                    timed.clear()
                elif record["kind"] == "step" and record.get("time") is not None:
                    timed.append((record["time"], self.step))
        (began, first), (ended, last) = (timed[0], timed[-1]) if timed else ((0.0, 0), (0.0, 0))
        self.seconds_per_step = max(0.0, ended - began) / max(1, last - first)


def _age(file: Path) -> float:
    """Seconds since the file was written; without end where it is missing."""
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return float("inf")


def _last_lines(path: Path) -> list[bytes]:
    """The whole lines at the end of a file that grows; none where it is missing or no file."""
    try:
        with open_file(path) as file:
            start = max(0, os.fstat(file.fileno()).st_size - _END_BYTES)
            file.seek(start)
            return file.read(2 * _END_BYTES).split(b"\n")[1 if start else 0 : -1]
    except OSError:
        return []


def watch_runs(place: Path, once: bool, seconds: float) -> int:
    """Show the run at `place`, or the runs in that folder, until none is at work; with `once`, as they stand.

    In a terminal the table of a folder waits for more runs until Ctrl-C. `seconds`: the least time between two lines
    of progress of a run.
    """
    console, lines = Console(), _Lines(seconds)
    has_table = console.is_terminal and not console.is_dumb_terminal
    is_run = is_there(place / "run.json") or is_there(place / "checkpoints")
    runs = _look(place, is_run, [], 0)
    if not runs and not (has_table and not once and place.is_dir()):
        raise UserError(f"no runs in {place}; train one with `ddp train digits`")
    # Ctrl-C is how one leaves a table of runs that go on.
    live = Live(console=console, auto_refresh=False) if has_table else None
    with contextlib.suppress(*([KeyboardInterrupt] if has_table else [])), live or contextlib.nullcontext():
        for looks in itertools.count(1):
            lines.tell(runs) if live is None else live.update(table(runs), refresh=True)
            if once or (all(run.is_over for run in runs) and (is_run or not has_table)):
                break
            time.sleep(_LOOK_SECONDS)
            runs = _look(place, is_run, runs, looks)
    bad = [run for run in runs if run.state in ("interrupted", "stopped", "failed")]
    if not bad:
        return ExitCode.DONE
    return ExitCode.PEERS_LOST if bad[0].state == "interrupted" else bad[0].record["exit_code"] or ExitCode.INTERNAL


def _look(place: Path, is_run: bool, before: list[WatchedRun], looks: int) -> list[WatchedRun]:
    """The runs that are shown, anew; now and then also those of a folder that have begun, at first its newest one."""
    if is_run:
        return [WatchedRun(RunDirectory(place))]
    known, found = [run.directory.path for run in before], []
    if looks % _LOOKS_PER_SEARCH == 0:
        found = list(find_runs(place, pass_over) if looks == 0 else find_runs(place))
    new = [each.path for each, record in found if record["status"] == "running" and each.path not in known]
    runs: list[WatchedRun] = []
    for path in (*known, *new):
        with contextlib.suppress(UserError):  # it has just gone
            runs.append(WatchedRun(RunDirectory(path)))
    shown = [run for run in runs if run.directory.path in known or not run.is_over]
    return shown or [WatchedRun(each) for each, _ in found[-1:]]


class _Lines:
    """Prints what happens at once, and the progress of a run at most every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._before: dict[Path, tuple[WatchedRun, float, str]] = {}
        """For each run how it stood, and when which progress was said."""

    def tell(self, runs: list[WatchedRun]) -> None:
        """Print the lines that are due."""
        for run in runs:
            label, attempts, now = run.record["layout"]["label"], len(run.record["attempts"]), time.monotonic()
            progress = "  ".join(part for part in (*_cells(run), *_latest(run)) if part)
            before, at, said = self._before.get(run.directory.path, (None, now, progress))
            if before is None:
                lines = [f"{label}, {run.standing()}, {progress}"]
            else:
                lines = [warning.partition(" ")[2] for warning in run.warnings if warning not in before.warnings]
                lines += [f"attempt {attempts} on {label}"] if attempts > len(before.record["attempts"]) else []
                lines += [run.standing()] if run.state != before.state else []
                if progress != said and (run.is_over or now - at >= self._seconds):
                    lines, at, said = [*lines, progress], now, progress
            self._before[run.directory.path] = run, at, said
            for line in lines:
                print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {run.name}: {line}", flush=True)


def table(runs: list[WatchedRun]) -> Group:
    """A row for each run and for each of its ranks, with remarks below."""
    drawn = Table(*(Column(overflow="fold") for _ in range(6)), box=None, pad_edge=False, show_header=False)
    below = [] if runs else ["no run yet; waiting for one (Ctrl-C leaves)"]
    for run in runs:
        drawn.add_row(*map(Text, (run.name, run.state, *_cells(run))), style="bold")
        # Where there are many ranks, those are shown that need the reader: lost ones, then slow ones.
        needy = sorted(run.ranks, key=lambda rank: (rank["process"] == "running", -rank["own"]))
        shown = [] if run.is_over else needy[:_MOST_RANKS]
        for rank in sorted(shown, key=lambda rank: rank["rank"]):
            place = f"  rank {rank['rank']} (node {rank['node_rank']}, {rank['host']})"
            sign = rank["process"] if rank["process"] != "running" else f"{duration_text(rank['age'])} ago"
            cells = (place, sign, f"step {rank['step']}", "", f"own {1e3 * rank['own']:.1f} ms")
            drawn.add_row(*map(Text, cells))
        remarks = ["  ".join(_latest(run))]
        remarks += (
            [f"{len(needy) - len(shown)} ranks more, which need less time"] if len(needy) > len(shown) > 0 else []
        )
        remarks += [run.standing()] if run.state not in ("starting", "running") else []
        remarks += [warning.partition(" ")[2] for warning in run.warnings[-3:]]
        below += [f"{run.name}: {text}" if len(runs) > 1 else text for text in remarks if text]
    return Group(drawn, *map(Text, below))


def _cells(run: WatchedRun) -> list[str]:
    """Step, loss, speed and time left."""
    total, record = run.record.get("total_steps"), run.last.get("step", {})
    loss, speed = record.get("loss"), record.get("samples_per_second")
    left = (total or 0) - run.step if run.state == "running" and run.seconds_per_step else 0
    return [
        f"step {run.step}" + (f" of {total} ({min(100, 100 * run.step // total)} %)" if total else ""),
        "" if loss is None else f"loss {loss:.4f}",
        "" if speed is None else f"{speed:,.0f} samples/s",
        f"about {duration_text(left * run.seconds_per_step)} left" if left > 0 else "",
    ]


def _latest(run: WatchedRun) -> list[str]:
    """The last evaluation and the last checkpoint."""
    evaluation, checkpoint = run.last.get("evaluation", {}), run.last.get("checkpoint")
    figures = {name: value for name, value in evaluation.items() if name not in ("time", "step", "epoch")}
    return [*readable(figures), *([f"checkpoint of step {checkpoint['step']}"] if checkpoint else [])]
