"""Checksums of all that a checkpoint holds, by name: what two trainings are compared by, step for step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_core.base.digests import checksum, named_tensors, optimizer_digest, weights_digest
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.job import Job, Sums
from ddp_core.trainers.train_state import TrainState

_NAMED = 3
_PLAIN = (bool, int, float, complex, str, list, tuple)


def state_sums(state: TrainState, in_parts: bool, is_first: bool, in_miniature: bool = False) -> Sums | None:
    """Checksums of weights, buffers, averages, optimizer (also its plain numbers), schedule, callbacks and position.

    A collective where something is cut among ranks; None on all ranks but the first. Left out are how long training
    took and, unless `in_miniature`, evaluations, which a repetition makes of fewer samples, and the loss of the epoch,
    which holds the losses that were read until now.
    """
    whole = state.ownership.whole_on_first(state.state_dict(in_parts))
    if whole is None or not is_first:
        return None
    left_out = ("trained_",) if in_miniature else ("trained_", "evaluation", "best", "epoch_")
    position = {name: value for name, value in whole["position"].items() if not name.startswith(left_out)}
    return {name: checksum(each) for name, each in named_tensors({**whole, "position": position})}


def state_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of a `TrainState.state_dict` with whole tensors, and of the weights in it.

    Left out is how long training took, which is another at each run.
    """
    weights = weights_digest(state["model"])
    others = {name: state.get(name) for name in ("scaler", "schedule", "average", "callbacks")}
    position = {name: value for name, value in state["position"].items() if not name.startswith("trained_")}
    parts = {
        "model": weights,
        "optimizer": optimizer_digest(state["optimizer"]),
        "others": weights_digest(dict(named_tensors(others))),
        "position": {**position, "requires_grad": state.get("requires_grad", {})},
    }
    text = json.dumps(parts, sort_keys=True)
    return {"state_sha256": hashlib.sha256(text.encode()).hexdigest(), "weights_sha256": weights}


class StepNotes(StepObserver):
    """Writes a line of checksums after each step, each rank into a file of its own; all ranks must have one.

    A rank that has a part of the state writes of the optimizer's plain numbers alone, unless it is rank 0. Callbacks
    that are called on rank 0 alone have kept nothing elsewhere.
    """

    def __init__(self, job: Job, state: TrainState, file: Path) -> None:
        self._state, self._is_first = state, job.is_first
        self._in_parts, self._in_miniature = job.layout.saves_in_parts, job.trial.in_miniature
        alone = [name for name, callback in state.named_callbacks() if callback.ranks == "first" and not job.is_first]
        self._left_out = tuple(f"callbacks.{name}." for name in alone)
        self._file = of_rank(file, job.collectives.world.rank).open("a", encoding="utf-8")

    def after_step(self, batch: StepBatch) -> None:
        has_all = self._is_first or self._state.ownership.has_whole_weights
        sums = state_sums(self._state, self._in_parts, has_all, self._in_miniature)
        if sums is None:
            numbers = group_numbers(self._state.optimizer.param_groups, "optimizer.param_groups.")
            sums = {name: checksum(each) for name, each in numbers}
        sums = {name: each for name, each in sums.items() if not name.startswith(self._left_out)}
        self._file.write(json.dumps([self._state.step, sums]) + "\n")
        self._file.flush()


def group_numbers(groups: Sequence[Mapping[str, Any]], start: str) -> Iterator[tuple[str, Tensor]]:
    """The plain numbers and words of an optimizer's groups, as tensors whose names begin with `start`."""
    for number, group in enumerate(groups):
        plain = {name: value for name, value in group.items() if name != "params" and isinstance(value, _PLAIN)}
        yield from ((f"{start}{number}.{name}", each) for name, each in named_tensors(plain))


def of_rank(file: Path, rank: int) -> Path:
    """The file of this rank, where `file` stands for those of all ranks."""
    return file.with_name(f"{file.name}-{rank}")


def read_notes(file: Path, rank: int) -> dict[int, Sums]:
    """The checksums that a rank has noted, by the number of steps done; empty where it has noted none."""
    try:
        lines = [json.loads(line) for line in of_rank(file, rank).read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return {}
    return dict(lines)


def first_other(ours: Mapping[int, Sums], theirs: Mapping[int, Sums], is_part: bool) -> tuple[int, list[str]] | None:
    """The first step in which something differs, and the names of what does; a step that one lacks differs, too.

    If it `is_part`, `theirs` need not have all that `ours` has.
    """
    for step in sorted(ours.keys() | theirs.keys()):
        if step not in ours or step not in theirs:
            return step, ["only one of them has this step"]
        one, other = ours[step], theirs[step]
        if names := [name for name in (other if is_part else {**one, **other}) if one.get(name) != other.get(name)]:
            return step, names
    return None


def named(names: list[str]) -> str:
    """The first names of what differs, and how many more there are."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
