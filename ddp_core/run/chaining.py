"""Whether a run has a chain, how it is kept, and what its first line tells of the run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ddp_core.distributed.process_group import Collectives
from ddp_core.observe.chain import CHAIN, ChainPlan, has_chain, read_begin
from ddp_core.record.run_record import RunRecord
from ddp_core.run.resuming import by_rank_0


def plan_chain(collectives: Collectives, record: RunRecord) -> ChainPlan | None:
    """How the run's chain is kept, the same on every rank; None where it has none. A collective.

    A run that has a chain goes on with it, whatever is asked for now. Raises UserError where it cannot be read.
    """
    found = by_rank_0(collectives, _numbers, record)
    if found is None:
        return None
    keep, every, is_new = found
    return ChainPlan(
        record.directory.path / CHAIN,
        keep,
        every,
        is_new,
        _facts(record),
        record.fence.check if record.fence is not None else lambda: None,
    )


def _numbers(record: RunRecord) -> tuple[int, int, bool] | None:
    """How many checkpoints are kept, every how many steps, and whether the chain is a new one."""
    request, directory = record.request, record.directory.path
    if request.is_tried:
        return None
    if has_chain(directory):
        begin = read_begin(directory / CHAIN)
        return begin["keep"], begin["every"], False
    keep = request.options.keep_for_audit
    if keep is None:
        return None
    total = request.loaded.experiment.total_steps(record.steps_per_epoch)
    return keep, steps_between(total, keep), True


def steps_between(total_steps: int, keep: int) -> int:
    """The steps from one kept checkpoint to the next, where `keep` of them stand evenly and the last at the end."""
    return -(-total_steps // keep)


def code_digest(files: dict[str, Any]) -> str:
    """SHA-256 over the `files` of a run's `source`: the digest of each file by its place."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _facts(record: RunRecord) -> dict[str, Any]:
    origin = record.origin
    return {
        "experiment_sha256": record.request.loaded.experiment.digest(),
        "code_sha256": code_digest(origin.source.files),
        "data_sha256": origin.data.sha256,
        "fingerprint": record.fingerprint,
    }
