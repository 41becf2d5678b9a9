"""What a logger is, and what it knows of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ddp_core.config.records import dotted

Setting = bool | str | float | int
Ending = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """What a logger knows of the run from the start."""

    directory: Path
    experiment: str
    settings: Mapping[str, Setting]
    """The experiment's settings under dotted names, the layout and the reduction."""

    @property
    def name(self) -> str:
        """The name of the run directory: no other run has it, and a resumed run keeps it."""
        return self.directory.name


class Logger(Protocol):
    """Keeps the figures of one run. Made with a LoggedRun, once for each attempt of the run."""

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of a record of metrics.jsonl. Steps after a `resume` record's step will be told again."""

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        """Keep the figures of the finished run and the digest of its weights."""

    def close(self, ending: Ending) -> None:
        """Write everything out; a stopped or failed run may be resumed by another attempt."""


def loggable(settings: Mapping[str, Any]) -> dict[str, Setting]:
    """Settings under dotted names, without lists and None, for which no logger has a place."""
    return {name: value for name, value in dotted(settings).items() if isinstance(value, Setting)}
