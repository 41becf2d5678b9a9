"""How far a run is, read from its directory and from what its nodes say; the run does not know that it is watched."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import open_file
from ddp_core.base.documents import BadDocument, parse_document
from ddp_core.base.errors import UserError
from ddp_core.observe.heartbeat import read_heartbeats
from ddp_core.observe.metrics import MetricsRecord
from ddp_core.record.directory import RunDirectory
from ddp_lab.cluster.runs import find_launched

# What a node says when it has noticed that something is wrong.
_NOTICE = re.compile(
    r"\blost\b|was killed|is stopped|starting the workers again|does not answer|silent for|stopped:? at|ddp: error"
)


@dataclass(frozen=True)
class Said:
    """One line of a node, and when it was read."""

    time: float
    node: str
    line: str


class Words:
    """What the nodes say; `hear` may be called from any thread."""

    def __init__(self) -> None:
        self._said: list[Said] = []
        self._guard = threading.Lock()

    def hear(self, node: str, line: str) -> None:
        """Keep a line of a node."""
        with self._guard:
            self._said.append(Said(time.time(), node, line))

    def since(self, moment: float) -> list[Said]:
        """Lines read after a moment."""
        with self._guard:
            return [said for said in self._said if said.time > moment]

    def first_notice(self, moment: float, not_from: str | None = None) -> Said | None:
        """The first line after a moment that tells of the fault; lines of the victim (`not_from`) do not count."""
        return next((said for said in self.since(moment) if said.node != not_from and _NOTICE.search(said.line)), None)


class Progress:
    """One run's metrics and record, read anew at each `look`."""

    def __init__(self, output: Path, launch_id: str) -> None:
        self._output, self._launch_id = output, launch_id
        self.path: Path | None = None
        self._offset = 0
        self.records: list[dict[str, Any]] = []
        """Every line of metrics.jsonl in the order written, also the lines of steps that were rolled back."""
        self.record: Mapping[str, Any] = {}

    def look(self) -> None:
        """Read what the run has written since the last look."""
        if self.path is None:
            self.path = find_launched(self._output, self._launch_id)
        if self.path is None:
            return
        with contextlib.suppress(UserError):
            self.record = RunDirectory(self.path).read()
        try:
            with open_file(self.path / "metrics.jsonl") as file:
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            return
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.records += parse_lines(whole)

    @property
    def step(self) -> int:
        """The last step that was made."""
        return next((int(entry["step"]) for entry in reversed(self.records) if "step" in entry), 0)

    def step_at(self, moment: float) -> int:
        """The last step that was made before a moment."""
        return next((int(e["step"]) for e in reversed(self.records) if "step" in e and e["time"] <= moment), 0)

    @property
    def attempts(self) -> int:
        """How often the run was begun or continued."""
        return len(self.record.get("attempts", []))

    @property
    def nnodes(self) -> int:
        """The number of nodes on which the newest attempt trains."""
        attempts = self.record.get("attempts") or [{}]
        return int(attempts[-1].get("layout", {}).get("nnodes", 0))

    @property
    def completed(self) -> bool:
        """Whether the run is complete."""
        return bool(self.record.get("status") == "completed")

    @property
    def trains(self) -> bool:
        """Whether the newest attempt has made a step."""
        starts = [index for index, entry in enumerate(self.records) if entry.get("kind") == "resume"]
        if len(starts) < self.attempts - 1:
            return False
        newest = self.records[starts[-1] :] if starts else self.records
        return any(entry.get("kind") == "step" for entry in newest)

    def first_rank_host(self) -> tuple[str, int] | None:
        """Host name and process id of rank 0, from its heartbeat."""
        beats = read_heartbeats(self.path) if self.path is not None else []
        return next(((str(beat["host"]), int(beat["pid"])) for beat in beats if beat["rank"] == 0), None)


def parse_lines(text: bytes) -> list[dict[str, Any]]:
    """The records in lines of metrics.jsonl, in the order written; those without a time are left out."""
    records = []
    for line in text.splitlines():
        with contextlib.suppress(BadDocument):
            records.append(dict[str, Any](parse_document(line, MetricsRecord)))
    return [record for record in records if "time" in record]


@dataclass(frozen=True)
class Recovery:
    """What the metrics say about one fault."""

    resumed_seconds: float
    steps_lost: int


def recovery(records: list[dict[str, Any]], moment: float) -> Recovery | None:
    """The first step of the first attempt that was begun after `moment`; None as long as there is none.

    `steps_lost` counts the steps that were made before and that this attempt has to make again.
    """
    made = 0
    for index, entry in enumerate(records):
        if entry.get("kind") == "resume" and entry["time"] > moment:
            step = next((later for later in records[index:] if later.get("kind") == "step"), None)
            if step is None:
                return None
            return Recovery(step["time"] - moment, max(0, made - entry["step"]))
        if entry.get("kind") == "resume":
            made = entry["step"]
        made = max(made, entry.get("step", 0))
    return None
