"""Where a run starts: whose directory it may write in, which checkpoint a rank may load, what a new worker prepares.

Tests run/beginning.py and run/starting.py, too.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer, find_checkpoints, newest_valid
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.experiment.file import load_experiment
from ddp_core.experiment.request import Request
from ddp_core.observe.metrics import Console
from ddp_core.record import run_record
from ddp_core.record.directory import RunDirectory
from ddp_core.record.lock import RunLock
from ddp_core.run.beginning import Prepared
from ddp_core.run.starting import choose_checkpoint, open_record, resume
from tests.core.record.test_run_record import ORIGIN, begun
from tests.core.run.test_run import HEAD
from tests.core.trainers.builders import CPU, experiment, trainer_of
from tests.support.records import a_record
from tests.support.wording import refusing


@pytest.mark.parametrize(("launch", "may"), [(None, False), ("another", False), ("mine", True)])
def test_a_directory_that_is_locked_is_left_to_its_holder_unless_it_is_of_this_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str | None, may: bool
) -> None:
    environment = a_record()["environment"]
    monkeypatch.setattr(run_record, "describe_environment", lambda: environment)  # asks git, which takes its time
    directory = RunDirectory.create(tmp_path, experiment(), Layout())
    request, collectives = begun(directory, World(launch_id="mine")).request, Collectives(World(launch_id=launch), CPU)
    refused = None
    with RunLock(directory.path), closing(Console()) as console:
        try:
            with open_record(collectives, request, directory, ORIGIN, 4, console):
                pass
        except UserError as error:
            refused = error
    assert len(directory.read()["attempts"]) == 1 + may
    assert (refused is None) == may
    assert may or "another run is using" in str(refused)


def test_a_rank_loads_nothing_but_the_checkpoint_that_rank_0_has_chosen(tmp_path: Path) -> None:
    class OnRank1(Collectives):
        def broadcast(self, value: Any) -> Any:
            assert value == (None, None), "only rank 0 chooses"
            return chosen, None

    directory, checkpointer = RunDirectory(tmp_path), Checkpointer(tmp_path / "checkpoints")
    collectives = OnRank1(World(rank=1, world_size=2), CPU)
    checkpointer.save({"weight": torch.zeros(2)}, step=3, epoch=0)
    chosen = newest_valid(directory.checkpoints)
    with closing(Console()) as console:
        assert choose_checkpoint(collectives, directory, console) == chosen
        # Where the disk is another one, or its view of the files is old, the same step may have other numbers.
        checkpointer.save({"weight": torch.ones(2)}, step=3, epoch=0)
        with refusing():
            choose_checkpoint(collectives, directory, console)


@pytest.mark.parametrize("written_by", ["this experiment", "its shorter self", "another"])
def test_a_checkpoint_is_of_an_experiment_that_the_run_has_trained(tmp_path: Path, written_by: str) -> None:
    directory = RunDirectory(tmp_path)
    record = a_record()
    attempt = record["attempts"][0] | {"experiment_sha256": "its shorter self"}
    directory.write(record | {"attempts": [attempt]})
    with trainer_of(experiment()) as trainer:
        sha256 = trainer.job.experiment.digest() if written_by == "this experiment" else written_by
        trainer.state.step = 2
        Checkpointer(directory.checkpoints).save(
            trainer.state.state_dict(), step=2, epoch=0, metadata={"experiment_sha256": sha256, "layout": "single-cpu"}
        )
        trainer.state.step = 0
        [start] = find_checkpoints(directory.checkpoints)
        if written_by == "another":
            with refusing():
                resume(trainer, start, directory, is_changed=False)
        else:
            resume(trainer, start, directory, is_changed=False)
        assert trainer.state.step == (0 if written_by == "another" else 2)


METRICS = """
_data = data

def data():
    return Splits(_data().train, _data().train)

def metrics(outputs, targets):
    import asked_late
    {body}
"""


@pytest.mark.parametrize(("body", "is_done"), [('return {"right": 1.0}', True), ("raise OSError", False)])
def test_it_tries_the_metrics_and_looks_for_the_code_unless_they_fail_without_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, is_done: bool
) -> None:
    (tmp_path / "mine.py").write_text(HEAD + METRICS.format(body=body))
    (tmp_path / "asked_late.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "asked_late", raising=False)
    prepared = Prepared()
    prepared.prepare(Request(load_experiment(str(tmp_path / "mine.py")), Layout(device="cpu"), Options()))
    assert prepared.splits is not None
    assert prepared.digest is not None
    assert prepared.usage is not None
    assert (prepared.source is not None) == is_done
    assert prepared.source is None or set(prepared.source.texts) == {"mine.py", "asked_late.py"}
