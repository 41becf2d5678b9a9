"""A segment is trained again: from its kept checkpoint, or from the beginning, on any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.checkpoint import load, read_checkpoint
from ddp_core.checkpoint.manifest import manifest_at
from ddp_core.cli.audit.draw import Segment
from ddp_core.cli.repeating import Different
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.record.directory import RunDirectory, find_runs
from ddp_core.trainers.noting import state_digests

_ENDS = (ExitCode.DONE, ExitCode.STOPPED)


def replay(directory: RunDirectory, record: Mapping[str, Any], segment: Segment, asked: Asked) -> None:
    """Train the segment again, and compare the state at its end.

    Raises Different where that is another one than the run has noted, and UserError where it cannot be trained.

    `asked`: what trains the run again, and where.
    """
    noted = {state["step"]: state for state in record["kept"]["states"]}
    changes: dict[str, Any] = {"keep_for_audit": None, "guard": "off", "rehearsal": "off", "max_restarts": 0}
    if segment.start:
        _require_noted(directory, noted[segment.start], segment)
        changes |= {"fork": str(directory.path), "at": segment.start, "init_from": None}
    # A state that is kept within the run is that of a run that goes on: a shorter one would evaluate there.
    if segment.stop != record["result"]["steps"]:
        changes["faults"] = (f"stop@{segment.stop}",)
    with Children("ddp-audit-") as children:
        changes["output"] = str(children.folder)
        ended = children.ddp(["train", *asked.model_copy(update=changes).to_words()])
        if ended.code not in _ENDS:
            raise UserError(
                f"segment {segment.number} cannot be trained again (exit code {ended.code}): {ended.error()}"
            )
        again, repeated = next(find_runs(children.folder))
        digests = state_digests(load(read_checkpoint(manifest_at(again.checkpoints, segment.stop))))
    if other := [name for name, digest in digests.items() if noted[segment.stop][name] != digest]:
        unlike = fingerprint_differences(repeated["fingerprint"], record["fingerprint"])
        under = f" (under another fingerprint, which the promise does not cover: {'; '.join(unlike)})" if unlike else ""
        what = "other weights" if "weights_sha256" in other else "the same weights, but another state of the rest"
        raise Different(
            f"different segment {segment.number}: steps {segment.start + 1} to {segment.stop}, trained again, end with "
            f"{what}{under}"
        )


def _require_noted(directory: RunDirectory, noted: Mapping[str, Any], segment: Segment) -> None:
    """Raises Different where the checkpoint with which the segment begins is gone, or holds another state."""
    try:
        digests = state_digests(load(read_checkpoint(manifest_at(directory.checkpoints, segment.start))))
    except UserError as error:
        raise Different(f"different checkpoint: segment {segment.number} cannot begin, {error}") from None
    if any(noted[name] != digest for name, digest in digests.items()):
        raise Different(f"different checkpoint: that of step {segment.start} is not the one that run.json notes")
