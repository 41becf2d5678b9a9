"""Claims and drills read from their JSON files; a file that cannot be read is listed, and raises no error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ddp_core.base.documents import BadDocument, read_document
from ddp_core.config.records import explain
from ddp_lab.records import CLAIM_FORMAT, DRILL_FORMAT, Figure, Part, Series


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Claim(_Loose):
    """A sentence from a source, what was measured, and the verdict (format ddp-claim/1)."""

    id: str
    title: str
    claim: str
    verdict: str
    original: str | None = None
    sources: list[str] = []
    method: str | None = None
    rule: str | None = None
    reason: str | None = None
    parts: list[Part] = []
    figures: list[Figure] = []
    series: list[Series] = []
    command: str | None = None
    seconds: float | None = None
    environment: dict[str, Any] = {}
    measured_at: str | None = None


class Fault(_Loose):
    """One fault of a drill, and what the run did about it."""

    name: str
    at_step: int | float | None = None
    noticed_seconds: float | None = None
    resumed_seconds: float | None = None
    steps_lost: int | float | None = None
    outcome: str | None = None


class Drill(_Loose):
    """Faults against a training run, and whether it ended as if there had been none (format ddp-drill/1)."""

    name: str = "drill"
    backend: str | None = None
    seed: int | None = None
    faults: list[Fault] = []
    digest: str | None = None
    undisturbed_digest: str | None = None
    identical: bool | None = None
    exit_code: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Findings:
    """Claims by number, drills by name, and files that could not be read."""

    claims: list[Claim] = field(default_factory=list)
    drills: list[Drill] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)


Model = TypeVar("Model", bound=BaseModel)


def read_findings(output: Path) -> Findings:
    """Every claims/C??.json and drill.json below `output`; of a claim that was measured twice, only the newer."""
    unreadable: list[tuple[str, str]] = []
    newest: dict[str, Claim] = {}
    for file in sorted(output.glob("**/claims/C[0-9][0-9].json")):
        claim = _read(file, CLAIM_FORMAT, Claim, output, unreadable)
        if claim is None:
            continue
        known = newest.get(claim.id)
        if known is None or (known.measured_at or "") <= (claim.measured_at or ""):
            newest[claim.id] = claim
    drills = [_read(file, DRILL_FORMAT, Drill, output, unreadable) for file in sorted(output.glob("**/drill.json"))]
    return Findings(
        [newest[name] for name in sorted(newest)], [drill for drill in drills if drill is not None], unreadable
    )


def _read(file: Path, form: str, model: type[Model], output: Path, unreadable: list[tuple[str, str]]) -> Model | None:
    name = file.relative_to(output).as_posix()
    try:
        # As JSON, whose reader refuses text that no chart can show: bytes that are no UTF-8.
        return model.model_validate_json(json.dumps(read_document(file, dict[str, Any], form)))
    except ValidationError as error:
        unreadable.append((name, explain(error)))
    except BadDocument as error:
        unreadable.append((name, str(error)))
    except OSError as error:
        unreadable.append((name, f"cannot be read: {error.strerror}"))
    return None
