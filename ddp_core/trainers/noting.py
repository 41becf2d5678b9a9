"""Checksums of all that a checkpoint holds, by name: what two trainings are compared by, step for step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_core.base.digests import checksum, named_tensors, optimizer_digest, weights_digest
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.train_state import TrainState

Sums = Mapping[str, str]
"""A checksum for each tensor and each number of the state, by its dotted name."""


def state_sums(state: TrainState, in_parts: bool, is_first: bool) -> Sums | None:
    """Checksums of weights, buffers, averages, optimizer (also its plain numbers), schedule, callbacks and position.

    A collective where something is cut among ranks; None on all ranks but the first. Left out are how long training
    took, and evaluations, which are made of fewer samples where steps are repeated.
    """
    whole = state.ownership.whole_on_first(state.state_dict(in_parts))
    if whole is None or not is_first:
        return None
    left_out = ("trained_", "evaluation", "best")
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

    A rank that has a part of the state writes of the optimizer's plain numbers alone, unless it is rank 0.
    """

    def __init__(self, state: TrainState, in_parts: bool, file: Path, rank: int) -> None:
        self._state, self._in_parts, self._is_first = state, in_parts, rank == 0
        self._file = _of_rank(file, rank).open("a", encoding="utf-8")

    def after_step(self, batch: StepBatch) -> None:
        has_all = self._is_first or self._state.ownership.has_whole_weights
        sums = state_sums(self._state, self._in_parts, has_all)
        if sums is None:
            sums = _numbers(self._state.optimizer.param_groups)
        self._file.write(json.dumps([self._state.step, dict(sums)]) + "\n")
        self._file.flush()


def _numbers(param_groups: Sequence[Mapping[str, Any]]) -> Sums:
    """The plain numbers of an optimizer's groups, named and summed as in `state_sums`."""
    groups = [
        {name: value for name, value in group.items() if name != "params" and not isinstance(value, Tensor)}
        for group in param_groups
    ]
    tree = {"optimizer": {"param_groups": groups}}
    return {name: checksum(each) for name, each in named_tensors(tree)}


def _of_rank(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}-{rank}")


def read_notes(file: Path, rank: int) -> dict[int, Sums]:
    """The checksums that a rank has noted, by the number of steps done; empty where it has noted none."""
    try:
        lines = [json.loads(line) for line in _of_rank(file, rank).read_text(encoding="utf-8").splitlines()]
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
