"""The run directory, which tells everything about a run: how it is created, found, read and written.

outputs/<experiment>/<layout>-<UTC time>-<short id>/ holds `run.json` (format `ddp-run/1`), `metrics.jsonl`, `log.txt`,
`checkpoints/`, `source/` (the experiment's file and the user's modules as they were), and at the end
`model.safetensors`. Only rank 0 writes these; they can be read at any time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from ddp_core.base.documents import BadDocument, json_text, read_document
from ddp_core.base.errors import UserError
from ddp_core.base.files import is_there, make_directory, replace_file
from ddp_core.base.refusals import MEND_OUTPUT, refused
from ddp_core.base.shown import shown_in
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout
from ddp_core.distributed.reports import tell_user
from ddp_core.record.lock import is_held
from ddp_core.record.run_json import MOST_RECORD_BYTES, RecordedRun

RECORD_FORMAT = "ddp-run/1"


def shown_record(record: RecordedRun) -> RecordedRun:
    """The record with its texts as a terminal may show them."""
    # The settings are code's, and may hold a line break: only their name is printed as it is.
    return cast(RecordedRun, {**shown_in({**record, "experiment": None}), "experiment": record["experiment"]})


class RunDirectory:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        """The lines that were printed for the user."""

    @classmethod
    def create(cls, output: Path, experiment: Experiment, layout: Layout) -> RunDirectory:
        """A new directory. Raises UserError (4) where it cannot be written."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = output / experiment.name / f"{layout.label}-{stamp}-{secrets.token_hex(3)}"
        try:
            make_directory(path / "checkpoints")
        except OSError as error:
            raise refused(error, Path(error.filename or output), todo=MEND_OUTPUT) from None
        return cls(path)

    def read(self) -> RecordedRun:
        """The content of run.json. Raises UserError (2) where it is missing or unreadable, or holds something else."""
        try:
            record = read_document(self.path / "run.json", RecordedRun, RECORD_FORMAT, MOST_RECORD_BYTES)
            told = record["weights_sha256"] is not None and "steps" in record["result"]
            if record["status"] == "completed" and not told:
                raise BadDocument("the run is completed, but its weights or its steps are not told")
        except (FileNotFoundError, NotADirectoryError) as error:
            reason = error.strerror
        except OSError as error:
            raise refused(error) from None
        except BadDocument as error:
            reason = str(error)
        else:
            return shown_record(record)
        raise UserError(f"{self.path} is not a run directory: it has no readable run.json ({reason})")

    def write(self, record: dict[str, Any]) -> None:
        """Replace run.json in one move: a reader sees the old file or the new one, also after a power cut."""
        try:
            replace_file(self.path / "run.json", json_text(record, indent=1) + "\n", durable=True)
        except OSError as error:
            raise refused(error, self.path / "run.json") from None

    def update(self, **fields: Any) -> None:
        """Change some fields of run.json. Raises UserError (4)."""
        self.write(self.read() | fields)

    @property
    def is_worked_in(self) -> bool:
        """Whether a process is working in this directory now."""
        return is_held(self.path)


def find_runs(
    place: Path, on_bad: Callable[[RunDirectory, str], None] | None = None
) -> Iterator[tuple[RunDirectory, RecordedRun]]:
    """Every readable run at or below `place`, with its record, oldest first.

    `on_bad` is called for each other directory with a run.json or with files in checkpoints/, with the line that says
    what is wrong with its run.json.
    """
    folders = {place}
    if not is_there(place / "run.json"):
        folders = {file.parent for file in place.glob("**/run.json")}
        folders |= {file.parents[1] for file in place.glob("**/checkpoints/*")}
    found: list[tuple[RunDirectory, RecordedRun]] = []
    for directory in map(RunDirectory, sorted(folders)):
        try:
            found.append((directory, directory.read()))
        except UserError as error:
            if on_bad is not None:
                on_bad(directory, str(error))
    yield from sorted(found, key=lambda pair: pair[1]["started_at"])


def pass_over(directory: RunDirectory, problem: str) -> None:
    """Print the line of a run directory without a readable record; for `on_bad` of `find_runs`."""
    tell_user(f"warning: passed over: {problem}")


def find_launch(
    output: Path,
    experiment: Experiment,
    launch_id: str,
    on_bad: Callable[[RunDirectory, str], None] | None = None,
) -> RunDirectory | None:
    """The run that an earlier round of the same launch has begun or finished; None if there is none."""
    runs = list(find_runs(output / experiment.name, on_bad))
    return next((directory for directory, record in reversed(runs) if record["launch_id"] == launch_id), None)
