"""Which rank trained which samples at which step: the proof that no sample was lost or trained twice.

With `--ledger` every rank appends two lines per step to `ledger/attempt-<n>-rank-<r>.jsonl`: the samples before it
trains them, and that the step is done. A step is done for all ranks when it is done on one of them, because that rank
has received the gradients of all; so a rank that is killed just after it sent its gradients leaves no gap. An attempt
that starts with the weights of step k cancels what earlier attempts did after step k, and shows that step k was done.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from ddp_core.base.beneath import each_line, make_folder_beneath
from ddp_core.base.documents import BadDocument, Count, parse_document
from ddp_core.base.errors import UserError
from ddp_core.base.files import LineFile
from ddp_core.observe.step import StepBatch, StepObserver


class _Line(TypedDict, total=False):
    """A line: `from_step` is the first of a file; a step before it is trained has `epoch` and `ids`; or it is done."""

    from_step: Count
    step: Count
    epoch: Count
    ids: list[Count]
    done: Count


class Ledger(StepObserver):
    """Writes one rank's lines of one attempt: steps counted from 1, their epoch, and the ids of their samples."""

    def __init__(self, directory: Path, attempt: int, rank: int, first_step: int) -> None:
        path = directory / "ledger" / f"attempt-{attempt:04d}-rank-{rank:04d}.jsonl"
        make_folder_beneath(path.parent)
        self._file = LineFile(path, "w", root=directory)
        self._write({"from_step": first_step})

    def before_step(self, batch: StepBatch) -> None:
        ids = np.concatenate([*batch.ids, np.empty(0, np.int64)])
        self._write({"step": batch.step + 1, "epoch": batch.epoch, "ids": ids.tolist()})

    def after_step(self, batch: StepBatch) -> None:
        self._write({"done": batch.step + 1})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record))


def committed_steps(directory: Path) -> dict[int, tuple[int, list[int]]]:
    """For each step that is done and not cancelled: its epoch and the ids of the samples that all ranks trained.

    Raises UserError where there is no ledger.
    """
    attempts: dict[int, list[list[_Line]]] = {}
    for path in sorted((directory / "ledger").glob("attempt-*-rank-*.jsonl")):
        attempts.setdefault(int(path.name.split("-")[1]), []).append(_lines(path))
    if not attempts:
        raise UserError(f"{directory} has no ledger; train with --ledger")
    steps: dict[int, tuple[int, list[int]]] = {}
    begun = {
        number: [lines[0]["from_step"] for lines in ranks if lines and "from_step" in lines[0]]
        for number, ranks in attempts.items()
    }
    for number in sorted(attempts):
        ranks = attempts[number]
        first = min(begun[number], default=max(steps, default=0))
        steps = {step: entry for step, entry in steps.items() if step <= first}
        done = max((line["done"] for lines in ranks for line in lines if "done" in line), default=0)
        following = next((begun[later] for later in sorted(attempts) if later > number and begun[later]), [0])
        done = max(done, min(following))
        for lines in ranks:
            for line in (line for line in lines if line.get("step", done + 1) <= done):
                epoch, ids = steps.get(line["step"], (line.get("epoch", 0), []))
                steps[line["step"]] = (epoch, ids + line.get("ids", []))
    return steps


def audit(directory: Path) -> str:
    """What the ledger shows, in one line.

    Raises UserError where no step was finished, a step is missing, or a sample was trained twice in an epoch.
    """
    steps = committed_steps(directory)
    if not steps:
        raise UserError(f"{directory}: no rank has finished a step yet, so its ledger shows nothing")
    missing = next((step for step in range(1, max(steps) + 1) if step not in steps), None)
    if missing is not None:
        raise UserError(f"{directory}: no rank trained step {missing}")
    epochs: dict[int, Counter[int]] = {}
    for epoch, ids in steps.values():
        epochs.setdefault(epoch, Counter()).update(ids)
    for epoch, counts in epochs.items():
        twice = [number for number, count in counts.items() if count > 1]
        if twice:
            raise UserError(
                f"{directory}: sample {twice[0]} and {len(twice) - 1} others were trained more than once "
                f"in epoch {epoch}"
            )
    total = sum(sum(counts.values()) for counts in epochs.values())
    return (
        f"ledger: {len(steps)} steps, {len(epochs)} epochs, {total} samples, each at most once per epoch, "
        "no step missing"
    )


def _lines(path: Path) -> list[_Line]:
    records: list[_Line] = []
    for line in each_line(path):
        try:
            records.append(parse_document(line, _Line))
        except BadDocument:
            break
    return records
