"""Ranks that record their micro-batches have a model without DistributedDataParallel, and end as one process does."""

from __future__ import annotations

import pytest

from ddp_core.config.layout import Layout
from ddp_core.distributed.process_group import process_group
from ddp_core.distributed.world import World
from tests.core.trainers.test_graphed import StandIn, direct
from tests.core.trainers.test_trainers import CPU, batch_norm_and_dropout, digests, experiment, samples, trainer_of
from tests.support.processes import run_processes

FIELDS = {"reduction": "exact", "last_batch": "keep"}


def _recorded(rank: int, world_size: int) -> tuple[tuple[str, str], int]:
    layout = Layout(kind="ddp", nproc_per_node=world_size)
    with (
        process_group(World.from_environment(), CPU, timeout=60) as collectives,
        pytest.MonkeyPatch.context() as patch,
    ):
        recorders: list[StandIn] = []

        def build() -> object:
            model = batch_norm_and_dropout()
            recorders.append(StandIn(model))
            patch.setattr("ddp_core.trainers.graphed.CudaRecorder", lambda device: recorders[0])
            return model

        details = {"collectives": collectives, "train": samples(78), "cuda_graph": True}
        with trainer_of(experiment(**FIELDS), build, layout, **details) as trainer:  # type: ignore[arg-type]
            trainer.train()
            found = digests(trainer)
    return found, recorders[0].replays


def test_ranks_that_record_end_as_one_process() -> None:
    expected = direct(batch_norm_and_dropout, **FIELDS)
    found = run_processes(_recorded, 3)
    assert [digest for digest, _ in found] == [expected] * 3
    assert sum(replays for _, replays in found) == 2 * (5 * 4 - 1)
