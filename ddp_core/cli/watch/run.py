"""What can be known of one run from its directory, brought up to date at each look; reads only what is new."""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime
from typing import Any, Literal

from ddp_core.base.documents import BadDocument, parse_document
from ddp_core.base.shown import shown, shown_in
from ddp_core.cli.watch.appended import AppendedLines
from ddp_core.cli.watch.curve import Curve
from ddp_core.cli.watch.ranks import Ranks
from ddp_core.observe.ledger import ranks_in_a_step
from ddp_core.observe.metrics import MetricsRecord
from ddp_core.record.directory import RunDirectory
from ddp_core.record.early import how_it_ended
from ddp_core.record.lock import is_held
from ddp_core.record.run_json import RecordedRun

State = Literal["starting", "running", "silent", "interrupted", "completed", "stopped", "failed"]

SILENT_SECONDS = 15.0
"""After so long without a step, it is said that there was none; a run of long steps may be silent for three of them."""
_READ_WHOLE_BYTES = 2**20
"""Of metrics.jsonl: of a larger piece, only some of the steps' records are read."""
_LOG_BYTES = 2**18
_WARNINGS = 3
_PACE_POINTS, _PACE_SECONDS = 300, 1.0


class WatchedRun:
    """One run. `look` reads what is new and returns what happened, a line each; the rest is as of the last look.

    A new one knows how the run stands, but nothing of its metrics and warnings yet. Raises UserError (2) without a
    readable record.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.record: RecordedRun = directory.read()
        self.step = 0
        self.losses = Curve()
        self.loss: float | None = None
        self.samples_per_second: float | None = None
        self.data_wait: float | None = None
        self.evaluation: dict[str, Any] = {}
        """The last record of an evaluation."""
        self.checkpoint: tuple[int, float] | None = None
        """The step of the last checkpoint, and the time of its record."""
        self.warnings: deque[str] = deque(maxlen=_WARNINGS)
        self.ranks = Ranks(directory.path)
        self.is_held = False
        """Whether a process works in the directory."""
        self._metrics = AppendedLines(directory.metrics)
        self._log = AppendedLines(directory.log, _LOG_BYTES)
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE_POINTS)
        self._record_file: tuple[int, int] | None = None
        self._now = time.time()
        self._last_sign = 0.0
        self._resumed_at: int | None = None
        self._read_standing()

    @property
    def name(self) -> str:
        """The experiment and the run directory's name."""
        return shown(f"{self.record['experiment']['name']}/{self.directory.path.name}")

    def look(self) -> list[str]:
        """Read what is new; returns what has happened since the last look. Raises UserError without a good record."""
        before, attempts = self.state, len(self.record["attempts"])
        self._read_standing()
        self._read_metrics()
        self._follow_heartbeats()
        happened = self._read_log()
        if len(self.record["attempts"]) > attempts:
            happened.append(f"attempt {len(self.record['attempts'])} on {self.record['layout']['label']}")
        if self._resumed_at is not None:
            happened.append(f"resumed at step {self._resumed_at}")
        if self.state != before:
            happened.append(self.standing())
        return happened

    def _read_standing(self) -> None:
        """Read the files that tell whether somebody works here."""
        self._now = time.time()
        try:
            self.is_held = is_held(self.directory.path, patience=0.0)
        except OSError:  # somebody else's run, whose lock may not be opened
            self.is_held = False
        self.ranks.look(self._now)
        # Last: a run writes how it has ended before it gives its lock back.
        self._read_record()

    @property
    def state(self) -> State:
        """How it stands. A run that was killed counts as silent until nobody can be expected to start it again."""
        status = self.record["status"]
        if status != "running":
            return status
        silent = self.silent_seconds
        is_dead = not self.is_held and bool(self.ranks.numbers("gone"))
        can_return = self.record["layout"]["kind"] == "ddp"
        if (is_dead and not can_return) or (not self.is_held and silent > self._patience):
            return "interrupted"
        if is_dead or silent > max(SILENT_SECONDS, 3 * (self.seconds_per_step or 0.0)):
            return "silent"
        return "running" if self.step or self.ranks.seen else "starting"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.state not in ("starting", "running", "silent")

    @property
    def _patience(self) -> float:
        """For so many seconds after its rank 0 has died a run may be silent: its launcher may start it again."""
        if self.record["layout"]["kind"] != "ddp":
            return SILENT_SECONDS
        timeout = dict[str, Any](self.record["options"]).get("timeout")
        return SILENT_SECONDS + (timeout if isinstance(timeout, int | float) else 60.0)

    @property
    def silent_seconds(self) -> float:
        """How long ago the last sign of life was, in seconds."""
        ages = [self._now - self._last_sign, *(rank.age for rank in self.ranks.seen)]
        return max(0.0, min(ages))

    def standing(self) -> str:
        """The state in words, with its reason."""
        state, message = self.state, self.record["message"]
        if state == "silent":
            return f"no step for {self.silent_seconds:.0f} s{self._cause_of_silence()}"
        if state == "interrupted":
            return f"interrupted at step {self.step}: its processes are gone; `ddp train` with --resume continues it"
        if state == "completed":
            digest = (self.record["weights_sha256"] or "")[:12]
            how = how_it_ended(self.record.get("ended_early"))
            steps = f"completed after {self.record['result'].get('steps')} steps"
            return f"{steps}, {how}, weights {digest}" if how is not None else f"{steps}, weights {digest}"
        return f"{state}: {message}" if state in ("stopped", "failed") and message else state

    def _cause_of_silence(self) -> str:
        """What is known of the ranks that keep the others waiting, to follow the words that there is no step."""
        for process in ("stopped", "gone"):
            if found := self.ranks.numbers(process):
                return f": rank {found} is {process}"
        if not self.is_held:
            return ": no process works here; its launcher may start it again"
        inside = ranks_in_a_step(self.directory.path, len(self.record["attempts"]) - 1)
        outside = [rank for rank, is_inside in inside.items() if not is_inside]
        if outside and len(outside) < len(inside):
            return f": rank {', '.join(map(str, outside))} has not begun the step that the others are in"
        return ""

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None in records of earlier versions."""
        return self.record.get("total_steps")

    @property
    def seconds_per_step(self) -> float | None:
        """By the clock, with evaluations and saves, over the last minutes of this attempt."""
        if len(self._pace) < 2:
            return None
        (began, first), (ended, last) = self._pace[0], self._pace[-1]
        return (ended - began) / (last - first) if last > first and ended > began else None

    @property
    def seconds_left(self) -> float | None:
        """How long it will go on, if it goes on as it does; None where it does not go on now."""
        if self.total_steps is None or self.seconds_per_step is None or self.state != "running":
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    @property
    def seconds_trained(self) -> float:
        """Wall time of the last attempt until now, or until its end."""
        ended = self.record["finished_at"] if self.is_over else None
        until = moment(ended) if ended else self._now - (self.silent_seconds if self.is_over else 0.0)
        return max(0.0, until - moment(self.record["attempts"][-1]["started_at"]))

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since the last checkpoint."""
        return None if self.checkpoint is None else max(0.0, self._now - self.checkpoint[1])

    def _read_record(self) -> None:
        try:
            status = (self.directory.path / "run.json").stat()
            file = (status.st_mtime_ns, status.st_ino)
        except OSError:
            file = None
        if file is not None and file == self._record_file:
            return
        self.record, self._record_file = self.directory.read(), file
        self._last_sign = max(self._last_sign, min(moment(self.record["attempts"][-1]["started_at"]), self._now))

    def _read_log(self) -> list[str]:
        """Keep the newest warnings; returns the new ones."""
        found: list[str] = []
        for line in self._log.read():
            text = shown(line.decode(errors="replace")).partition(" ")[2]
            if "warning: " in text:
                found.append(text)
        self.warnings.extend(found)
        return found

    def _read_metrics(self) -> None:
        """Read the new records; of very many, evenly some of the steps', and the last one."""
        self._resumed_at = None
        stride = 1 + self._metrics.unread_bytes // _READ_WHOLE_BYTES
        passed_over: bytes | None = None
        for number, line in enumerate(self._metrics.read()):
            if number % stride and line.startswith(b'{"kind": "step"'):
                passed_over = line
                continue
            passed_over = None
            self._take(line)
        if passed_over is not None:
            self._take(passed_over)

    def _take(self, line: bytes) -> None:
        try:
            record = shown_in(parse_document(line, MetricsRecord))
        except BadDocument:
            return
        kind, step, written = record["kind"], record["step"], record.get("time")
        self.step = step
        if kind == "resume":
            self.losses.roll_back(step)
            self._pace.clear()
            self._resumed_at = step
        elif kind == "evaluation":
            self.evaluation = dict(record)
        elif kind == "checkpoint" and written is not None:
            self.checkpoint = (step, written)
        elif kind == "step":
            self.loss = record.get("loss")
            self.samples_per_second, self.data_wait = record.get("samples_per_second"), record.get("data_wait")
            if self.loss is not None:
                self.losses.add(step, self.loss)
            self._note_pace(written, step)
        if written is not None:
            self._last_sign = max(self._last_sign, min(written, self._now))

    def _note_pace(self, written: float | None, step: int) -> None:
        while self._pace and self._pace[-1][1] > step:
            self._pace.pop()
        if written is not None and (not self._pace or written - self._pace[-1][0] >= _PACE_SECONDS):
            self._pace.append((written, step))

    def _follow_heartbeats(self) -> None:
        """Take the step from the heartbeats, which come once a second; records of long steps come more rarely."""
        if self.record["status"] == "running" and self.ranks.seen:
            first = self.ranks.seen[0]
            if first.step > self.step:
                self.step = first.step
                self._note_pace(self._now - first.age, first.step)


def moment(text: str) -> float:
    """The Unix seconds of a moment in a record, `2026-01-31T12:00:00Z`; 0 for any other text."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
