"""What a run tells while it trains: records in metrics.jsonl and for TensorBoard, lines or a progress bar for people.

metrics.jsonl holds one JSON object per line with a `kind`: `step` (step, epoch, loss, lr, samples_per_second,
data_wait), `evaluation` (step, epoch, test_loss, test_accuracy), `digest` (step, weights_sha256), `resume` (step: the
records of later steps before this line were rolled back; ranks), `checkpoint` (step, seconds) and `dealt`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NotRequired

from typing_extensions import TypedDict

from ddp_core.base.beneath import each_line, open_beneath, open_file
from ddp_core.base.documents import BadDocument, Count, json_text, parse_document
from ddp_core.base.ending import take_off_bar
from ddp_core.base.files import LineFile
from ddp_core.base.shown import shown_in

if TYPE_CHECKING:
    from ddp_core.observe.tensorboard import TensorBoard

_END_BYTES = 2**16
_LONGEST_LINE = 2**20


class MetricsRecord(TypedDict):
    """One record, as far as it is read by name; an evaluation has further figures of the experiment's own."""

    kind: str
    step: Count
    time: NotRequired[float]
    epoch: NotRequired[Count]
    loss: NotRequired[float | None]
    samples_per_second: NotRequired[float | None]
    data_wait: NotRequired[float | None]
    weights_sha256: NotRequired[str]
    ranks: NotRequired[Count]


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends records to metrics.jsonl, in whole lines, so that the file can be read at any time; tells the `board`.

    Without a `path` it writes and tells nothing. `may_write` is called before each record, and raises where another
    process has taken the run over.
    """

    def __init__(
        self,
        path: Path | None,
        board: TensorBoard | None = None,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._may_write = may_write
        self._board = board
        self._written: set[tuple[str, int]] = set()
        self._file: LineFile | None = None
        if path is not None:
            self._file = LineFile(path)
            _cut_torn_line(path)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; NaN and infinities become null. The board gets its step and its numbers."""
        if self._file is None or (kind, fields.get("step", -1)) in self._written:
            return
        self._may_write()
        record = {"kind": kind, "time": round(time.time(), 3)} | fields
        self._file.write(json_text(record))
        values = {name: value for name, value in fields.items() if isinstance(value, float)}
        if self._board is not None:
            self._board.record(kind, fields.get("step", 0), values)

    def go_on(self, step: int, **fields: Any) -> int:
        """Go on after `step`: later records are rolled back, and of that step no kind of record is written twice.

        `fields`: what else the line about it says. Returns the newest step that was recorded before.
        """
        newest = 0
        if self._file is not None:
            kinds, newest = _near_end(self._file.path, step)
            self._written = {(kind, step) for kind in kinds}
        self.write("resume", step=step, **fields)
        return newest

    def finish(self, result: Mapping[str, Any], weights_sha256: str) -> None:
        """Tell the board the numbers of the run's result, and the digest of its weights."""
        figures = {name: value for name, value in result.items() if isinstance(value, int | float)}
        if self._board is not None:
            self._board.finish(figures, weights_sha256)

    def close(self) -> None:
        """Flush and close the file and the board."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records, or those of one `kind`, without rolled-back steps and lines that are no records."""
    return list(each_record(path, kind))


def each_record(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """What `read_metrics` returns, one record at a time: the file is read twice, and never in memory as a whole."""
    resumed_at = [record["step"] for record in _lines(path, b'"resume"') if record["kind"] == "resume"]
    # A record counts if no later line goes back to a step before its own.
    limits = [*reversed(list(accumulate(reversed(resumed_at), min))), math.inf]
    resumes = 0
    for record in _lines(path):
        if record["kind"] == "resume":
            resumes = min(resumes + 1, len(resumed_at))
        if record["step"] <= limits[resumes] and kind in (None, record["kind"]):
            yield dict(record)


def _cut_torn_line(path: Path) -> None:
    """Cut off what a full disk or a crash has left of a last line, so that the next record is no part of it."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - _LONGEST_LINE)
        file.seek(begin)
        whole = begin + file.read(_LONGEST_LINE).rfind(b"\n") + 1
    if whole < size:
        descriptor = open_beneath(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, whole)
        finally:
            os.close(descriptor)


def _near_end(path: Path, step: int) -> tuple[set[str], int]:
    """The kinds of the records of one step near the end of the file, but for `resume`, and the newest `step` there.

    What was rolled back does not count.
    """
    kinds: set[str] = set()
    newest = 0
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        for line in file.read(2 * _END_BYTES).splitlines():
            with contextlib.suppress(BadDocument):
                record = parse_document(line, MetricsRecord)
                if record["kind"] == "resume":
                    kinds = kinds if record["step"] >= step else set()
                    newest = min(newest, record["step"])
                    continue
                if record["step"] == step:
                    kinds.add(record["kind"])
                if record["kind"] == "step":
                    newest = record["step"]
    return kinds, newest


def _lines(path: Path, containing: bytes = b"") -> Iterator[MetricsRecord]:
    """The records as they are written, but for lines that are no records."""
    with contextlib.suppress(FileNotFoundError):
        for line in each_line(path):
            if containing in line:
                with contextlib.suppress(BadDocument):
                    yield shown_in(parse_document(line, MetricsRecord))


def readable(figures: Mapping[str, Any]) -> list[str]:
    """The figures that are single numbers, for people: 'test loss 0.1234'."""
    return [
        f"{name.replace('_', ' ')} {value:.4f}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]


def duration_text(seconds: float) -> str:
    """About so long, for people: '40 s', '12 min', '3 h 5 min', '2 d 3 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


SILENT_SECONDS = 60.0
"""After so long without a line, a run without a terminal says how far it is."""


class Console:
    """Prints for the user: rank 0 everything, other ranks only warnings with their rank. Also keeps log.txt."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._is_first = rank == 0
        self._prefix = f"[rank {rank}] " if world_size > 1 and rank else ""
        self.draws = self._is_first and sys.stderr.isatty()
        """Whether there is a terminal to draw a bar on."""
        self._log: LineFile | None = None
        self._may_write: Callable[[], None] = lambda: None
        self._bar: Any = None
        self._printed_at = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        """The number of the first step that this process made, and the time of its end in seconds (monotonic clock)."""

    def log_to(self, path: Path, may_write: Callable[[], None] = lambda: None) -> None:
        """Also write the printed lines to this file; `may_write` is called before each, and raises if it must not."""
        self._may_write = may_write
        # A file's name may hold bytes that are no UTF-8.
        self._log = LineFile(path, errors="surrogateescape")

    def say(self, text: str) -> None:
        """Print a line for the user, on rank 0 only."""
        self._print(text, sys.stdout if self._is_first else None)

    def warn(self, text: str) -> None:
        """Print a warning with its rank, on any rank."""
        self._print(f"{self._prefix}warning: {text}", sys.stderr)

    def progress(self, step: int, total: int, loss: float) -> None:
        """Show how far the run is; to be called after every step."""
        # On a terminal this is a bar. Elsewhere it is a line, but only when nothing was printed for a minute.
        if not self._is_first:
            return
        now = time.monotonic()
        if self._first_step is None:
            self._first_step = (step, now)
        figures = [f"loss {loss:.4f}"] if math.isfinite(loss) else []
        if self.draws:
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, initial=step, unit="step", leave=False, dynamic_ncols=True)
            if figures:
                self._bar.set_postfix_str(figures[0], refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._printed_at > SILENT_SECONDS:
            first, began = self._first_step
            left = duration_text((total - step) * (now - began) / max(1, step - first))
            self.say("  ".join([f"step {step:6d} of {total}", *figures, f"about {left} left"]))

    def end_progress(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """End the bar and the log."""
        self.end_progress()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _print(self, text: str, stream: IO[str] | None) -> None:
        """Write a line to the log and, with a `stream`, there."""
        if self._log is not None:
            self._may_write()
            self._log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")
        if stream is None:
            return
        self._printed_at = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=stream)
        else:
            if not self._is_first:
                take_off_bar()  # rank 0 draws it anew
            print(text, file=stream, flush=True)
