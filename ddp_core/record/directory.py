"""The run directory, which tells everything about a run: how it is created, found, read and written.

outputs/<experiment>/<layout>-<UTC time>-<short id>/ holds `run.json` (format `ddp-run/1`), `metrics.jsonl`, `log.txt`,
`checkpoints/`, `source/` (the experiment's file and the user's modules as they were), and at the end
`model.safetensors`. Only rank 0 writes these; they can be read at any time.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file
from ddp_core.base.refusals import MEND_OUTPUT, refused
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout
from ddp_core.record.lock import is_held

RECORD_FORMAT = "ddp-run/1"


class RunDirectory:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        """The folder of the checkpoints."""
        self.metrics = path / "metrics.jsonl"
        """The file of metrics, one JSON object per line."""
        self.log = path / "log.txt"
        """The file of the lines printed for the user."""

    @classmethod
    def create(cls, output: Path, experiment: Experiment, layout: Layout) -> RunDirectory:
        """A new directory. Raises UserError (4) where it cannot be written."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = output / experiment.name / f"{layout.label}-{stamp}-{secrets.token_hex(3)}"
        try:
            (path / "checkpoints").mkdir(parents=True)
        except OSError as error:
            raise refused(error, Path(error.filename or output), todo=MEND_OUTPUT) from None
        return cls(path)

    def read(self) -> dict[str, Any]:
        """The content of run.json. Raises UserError (2) where it is missing, unreadable, or of another format."""
        try:
            record = json.loads((self.path / "run.json").read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            raise UserError(f"{self.path} is not a run directory: it has no readable run.json") from None
        except OSError as error:
            raise refused(error) from None
        if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
            raise UserError(f"{self.path}/run.json is not of format {RECORD_FORMAT}")
        return record

    def write(self, record: dict[str, Any]) -> None:
        """Replace run.json in one move: a reader sees the old file or the new one. Raises UserError (4)."""
        try:
            replace_file(self.path / "run.json", json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise refused(error, self.path / "run.json") from None

    def update(self, **fields: Any) -> None:
        """Change some fields of run.json. Raises UserError (4)."""
        self.write(self.read() | fields)

    @property
    def is_live(self) -> bool:
        """Whether a process is working in this directory now."""
        return is_held(self.path)


def find_runs(place: Path) -> Iterator[tuple[RunDirectory, dict[str, Any]]]:
    """Every readable run at or below `place`, with its record, oldest first."""
    files = [place / "run.json"] if (place / "run.json").exists() else sorted(place.glob("**/run.json"))
    found: list[tuple[RunDirectory, dict[str, Any]]] = []
    for directory in [RunDirectory(file.parent) for file in files]:
        with suppress(UserError):
            found.append((directory, directory.read()))
    yield from sorted(found, key=lambda pair: str(pair[1].get("started_at", "")))


def find_launch(output: Path, experiment: Experiment, launch_id: str) -> RunDirectory | None:
    """The run that an earlier round of the same launch has begun or finished; None if there is none."""
    runs = list(find_runs(output / experiment.name))
    return next((directory for directory, record in reversed(runs) if record.get("launch_id") == launch_id), None)
