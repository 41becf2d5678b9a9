"""Run directories read from disk; a broken directory becomes a record that says what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.files import is_there
from ddp_core.config.layout import Layout
from ddp_core.observe.metrics import each_record
from ddp_core.record.directory import RunDirectory, find_runs
from ddp_core.record.recorded import broken_promise, how_it_ended, what_broke_it
from ddp_core.record.run_json import RecordedRun
from ddp_core.record.weights import WEIGHTS, exchanged_weights
from ddp_lab.report.values import finite

MOST_RECORDS = 5_000
"""More points than a chart can show; a run of millions of steps has so many records of each kind in memory, or half."""

_DISTURBED_SHARE = 0.1


@dataclass(frozen=True)
class Curve:
    """One quantity over a run: its value at each step."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A run that could be read: its record, its status, its curves."""

    path: Path
    name: str
    """The path below the output folder."""
    record: RecordedRun
    layout: Layout
    status: str
    """completed, failed, stopped, running, or interrupted: its record says running, but no process works in it."""
    curves: Mapping[str, Curve]
    metrics: list[dict[str, Any]]
    """Its records, `thinned`."""
    weights_problem: str | None
    """What is wrong with the files of its weights, in words."""
    problem: str | None = None

    @property
    def experiment(self) -> str:
        """The experiment's name."""
        return self.record["experiment"]["name"]

    @property
    def seed(self) -> int | None:
        """The experiment's seed."""
        return self.record["experiment"].get("seed")

    @property
    def completed(self) -> bool:
        """Whether it trained to its end."""
        return self.status == "completed"

    @property
    def ended(self) -> str:
        """The status, which is "completed early" where a callback has ended the run."""
        return "completed early" if self.early_end else self.status

    @property
    def early_end(self) -> str | None:
        """Where and why a callback has ended the run, in words; None where none has."""
        return how_it_ended(self.record)

    def result(self, name: str) -> float | None:
        """A number of the run's result."""
        return finite(self.record["result"].get(name))

    @property
    def disturbance(self) -> str | None:
        """How much other programs disturbed the run while it was timed, in words; None where that was little."""
        return disturbance(self.record)

    @property
    def broken(self) -> str | None:
        """Why its weights are no reference, in a few words: `promise broken in step N`, or its file has others."""
        return broken_promise(self.record) or (self.weights_problem and "other weights than recorded")

    @property
    def what_broke_it(self) -> str | None:
        """What the guard found, or what is wrong with the weights, in words; None where they are a reference."""
        return what_broke_it(self.record) or self.weights_problem

    @property
    def guard(self) -> str | None:
        """The guard's mode, checks and time, in words; None where the record does not tell."""
        return guard_figures(self.record)

    @property
    def is_reference(self) -> bool:
        """Whether its weights must be those of every other such run of the experiment."""
        return self.completed and self.record["options"]["reduction"] == "exact" and self.broken is None

    @property
    def last_step(self) -> int | None:
        """The highest step in its metrics or its result."""
        steps = [finite(record.get("step")) for record in self.metrics]
        known = [step for step in [*steps, self.result("steps")] if step is not None]
        return int(max(known)) if known else None


@dataclass(frozen=True)
class BrokenRun:
    """A directory that looks like a run but cannot be read as one."""

    path: Path
    name: str
    problem: str


@dataclass(frozen=True)
class Inventory:
    """All run directories below an output folder."""

    runs: list[Run]
    broken: list[BrokenRun]
    left_out: int
    """How many runs were made to measure a claim: the report shows the claim instead of these runs."""


def read_runs(output: Path) -> Inventory:
    """Return every run below `output`, the oldest first, and every directory that cannot be read as one."""
    runs, broken, left_out = [], [], 0
    problems: dict[Path, str] = {}

    def on_bad(directory: RunDirectory, problem: str) -> None:
        problems[directory.path] = problem.replace(str(directory.path), "this")

    readable = {directory.path: record for directory, record in find_runs(output, on_bad)}
    for path in [*readable, *sorted(_other_places(output) - set(readable))]:
        name = path.relative_to(output).as_posix() if path != output else path.name
        if "claims" in Path(name).parts:
            left_out += 1
        elif (record := readable.get(path)) is not None:
            runs.append(_read(path, name, record))
        else:
            problem = problems.get(path, "no run.json: it ended before its record was written")
            broken.append(BrokenRun(path, name, problem))
    return Inventory(runs, broken, left_out)


def _other_places(output: Path) -> set[Path]:
    """Directories that look like runs although their record may never have been written."""
    marks = ("run.json", "metrics.jsonl", "run.lock", "fence.json")
    places = {file.parent for mark in marks for file in output.glob(f"**/{mark}")}
    return places | {file.parent for file in output.glob("*/*-*Z-*/checkpoints")}


def _read(path: Path, name: str, record: RecordedRun) -> Run:
    # A record has more than these fields, and an older one fewer.
    found = record["layout"].items()
    layout = Layout.model_validate({field: each for field, each in found if field in Layout.model_fields})
    metrics, problem = _metrics(path / "metrics.jsonl")
    drawn = curves(metrics)
    status, wrong = _status(path, record), _weights_problem(path, record)
    return Run(path, name, record, layout, status, drawn, metrics, wrong, problem)


def _weights_problem(path: Path, record: RecordedRun) -> str | None:
    """What is wrong with the files of a completed run's weights, where they are there; None where nothing is."""
    if record["status"] != "completed" or not is_there(path / WEIGHTS):
        return None
    try:
        exchanged = exchanged_weights(path, record)
    except UserError as error:
        return str(error).replace(f"{path}/", "")
    return None if exchanged is None else f"{exchanged} holds other weights than run.json says"


def _status(path: Path, record: RecordedRun) -> str:
    if record["status"] != "running":
        return record["status"]
    try:
        return "running" if RunDirectory(path).is_worked_in else "interrupted"
    except OSError:
        return "interrupted"


def _metrics(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    try:
        return thinned(each_record(path)), None
    except OSError as error:
        return [], f"metrics.jsonl cannot be read: {error.strerror}"


def thinned(records: Iterable[dict[str, Any]], most: int = MOST_RECORDS) -> list[dict[str, Any]]:
    """At most `most` records of each kind and the last one, evenly spread, in their order; in constant memory."""
    kept: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    last: dict[str, tuple[int, dict[str, Any]]] = {}
    every: dict[str, int] = {}
    seen = Counter[str]()
    for number, record in enumerate(records):
        kind = str(record.get("kind"))
        chosen, step = kept.setdefault(kind, []), every.setdefault(kind, 1)
        last[kind] = (number, record)
        if seen[kind] % step == 0:
            chosen.append(last[kind])
        seen[kind] += 1
        if len(chosen) > most:
            del chosen[1::2]
            every[kind] = 2 * step
    numbered = dict(pair for chosen in (*kept.values(), list(last.values())) for pair in chosen)
    return [numbered[number] for number in sorted(numbered)]


def curves(records: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the training loss and every evaluated quantity as curves."""
    found: dict[str, Curve] = {}
    for record in records:
        step = finite(record.get("step"))
        if step is None or record.get("kind") not in ("step", "evaluation"):
            continue
        for name, value in _quantities(record):
            curve = found.setdefault(name, Curve())
            curve.steps.append(step)
            curve.values.append(value)
    return found


def _quantities(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if record["kind"] == "step":
        value = finite(record.get("loss"))
        if value is not None:
            yield "train_loss", value
        return
    for name, content in record.items():
        value = finite(content)
        if name not in ("kind", "time", "step", "epoch") and value is not None:
            yield name, value


def disturbance(record: Mapping[str, Any]) -> str | None:
    """How much other programs disturbed the run of this run.json, in words; None where they took under a tenth."""
    cores = (record.get("environment") or {}).get("cores")
    others = (record.get("result") or {}).get("other_cores_busy")
    if not isinstance(cores, int) or not isinstance(others, float) or others < _DISTURBED_SHARE * cores:
        return None
    return f"other programs kept {others:.1f} of {cores} core{'s' if cores > 1 else ''} busy"


def guard_figures(record: Mapping[str, Any]) -> str | None:
    """The guard of the last attempt: its mode, its checks, their time. None where the record does not tell."""
    guard = (record.get("attempts") or [{}])[-1].get("guard")
    if not isinstance(guard, Mapping) or "mode" not in guard:
        return None
    if guard["mode"] == "off":
        return "off"
    parts = [guard["mode"]]
    spent, whole = sum(guard.get("seconds", {}).values()), (record.get("result") or {}).get("seconds")
    parts.append(f"{spent:.2f} s" + (f", {100 * spent / whole:.1f} % of the run" if whole else ""))
    parts += [f"{kind}: {guard[kind]}" for kind in ("rehearsal", "witness") if guard.get(kind) is not None]
    return "; ".join(parts)
