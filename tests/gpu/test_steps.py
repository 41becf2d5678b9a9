"""Steps that go wrong on a GPU: bad losses, requests to stop, a lack of memory, an overflow, a killed rank."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import find_checkpoints, load, newest_valid
from ddp_core.config.experiment import Component
from ddp_core.sampler import GlobalOrder
from ddp_core.trainers.passes import WeightUpdate
from ddp_core.trainers.train_state import TrainState
from tests.core.trainers.builders import digests, experiment, finished, samples, trainer_of
from tests.core.trainers.test_step_losses import OPTIMIZERS
from tests.faults.launches import DOTS, Watch, launched
from tests.support.commands import command, trained

pytestmark = pytest.mark.timeout(600)


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_update_is_made_from_the_first_bad_loss_on(optimizer: str, precision: str) -> None:
    record = experiment(reduction="exact", precision=precision, optimizer=OPTIMIZERS[optimizer])
    data = samples(256)
    data.inputs[GlobalOrder(256, 0).ids(0, 32, 48)[13]] = math.nan
    seen = r"nan at step 3 on rank 0 .*\(seen after step 10, no update was made since"
    with trainer_of(record, train=data, device=cuda(), log_every=10) as trainer:
        with pytest.raises(UserError, match=seen):
            trainer.train()
        after = digests(trainer)
    two = record.model_copy(update={"max_steps": 2})
    assert after == digests(finished(two, train=samples(256), device=cuda()))


@pytest.mark.gpu
def test_a_nan_off_the_logs_rhythm_is_in_no_checkpoint(tmp_path: Path) -> None:
    words = ["train", DOTS, "--device", "cuda", "--output", tmp_path, "--log-every", "10", "--checkpoint-every", "15"]
    ended = command(*words, "--fault", "nan@17")
    assert ended.code == 5, ended.errors
    directory, record = trained(tmp_path)
    assert re.search(r"loss is nan at step 17 on rank 0 \(node 0\), sample ids (\d+), (\d+)", record["message"])
    newest = newest_valid(directory.checkpoints)
    assert newest is not None
    assert newest.step in (15, 16), "16 where the second epoch is the best so far"
    assert all(value.isfinite().all() for value in load(newest)["model"].values())
    assert command(*words, "--resume", "auto").code == 0


@pytest.mark.gpu
def test_an_overflow_in_the_first_step_leaves_no_unwritten_momentum() -> None:
    """As on the CPU: see tests/core/trainers/test_passes.py."""
    ends = []
    for fused in (False, True):
        weight = nn.Parameter(torch.ones(1000, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
        state = TrainState(nn.ParameterList([weight]), optimizer, scaler=torch.amp.GradScaler("cuda", 4.0))
        update = WeightUpdate(experiment(optimizer=Component(name="here")), state, 4, clip=pytest.fail)
        for step, gradient in enumerate((torch.inf, 1.0, 2.0)):
            assert state.scaler is not None
            weight.grad = state.scaler.scale(torch.full_like(weight, gradient))
            rubbish = torch.full((1000,), math.nan, device="cuda")
            del rubbish  # the next tensor of this size gets its memory
            update.make(step)
        ends.append(weight.tolist())
    assert ends[1] == pytest.approx(ends[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_a_request_to_stop_is_met_at_the_end_of_the_step(kind: str, tmp_path: Path) -> None:
    words = ["train", DOTS, "--layout", kind, "--device", "cuda", "--nproc-per-node", "1", "--output", str(tmp_path)]
    # Losses are read at the ends of epochs only, every eighth step; a step takes six pauses.
    with launched(*words, "--log-every", "1000", "--checkpoint-every", "1000", pause=0.2) as launch:
        Watch(tmp_path).wait_for_step(8)
        launch.signal(signal.SIGTERM)
        ended = launch.end()
    assert ended.code == 75, ended.errors
    found = re.search(r"stopped: at step (\d+)", ended.errors)
    assert found is not None
    assert 8 <= int(found[1]) <= 10, "not at the next time that losses are read, step 16"
    directory, _ = trained(tmp_path)
    assert find_checkpoints(directory.checkpoints)[0].step == int(found[1])


GREEDY = '''
"""Is a lack of memory on a GPU explained?"""
import torch
from ddp_core.data.splits import InMemory, Splits
from ddp_core.config.experiment import Experiment


class Greedy(torch.nn.Linear):
    def forward(self, inputs):
        if {when}:
            torch.empty(2**45, dtype=torch.uint8, device=inputs.device)
        return super().forward(inputs)


def model():
    return Greedy(4, 2)


def data():
    both = InMemory(torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64))
    return Splits(both, both, 2, None, "")


experiment = Experiment(name="greedy", global_batch_size=8, micro_batch=4)
'''


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["self.training", "not self.training"], ids=["training", "evaluation"])
@pytest.mark.parametrize("layout", ["single", "ddp", "dp"])
def test_a_lack_of_memory_says_what_to_do(layout: str, when: str, tmp_path: Path) -> None:
    file = tmp_path / "greedy.py"
    file.write_text(GREEDY.replace("{when}", when))
    place = ["--layout", layout, "--device", "cuda", "--nproc-per-node", "1"]
    ended = command("train", file, *place, "--output", tmp_path / "outputs")
    assert ended.code == 4, ended.errors
    assert "Traceback" not in ended.errors
    assert "rank 0 (node 0): out of memory (CUDA out of memory. Tried to allocate " in ended.errors
    assert "--set micro_batch=N" in ended.errors
    assert trained(tmp_path / "outputs")[1]["exit_code"] == 4


@pytest.mark.gpu2
@pytest.mark.parametrize("log_every", ["1", "1000"], ids=["waiting for the device", "running ahead of it"])
def test_a_killed_rank_is_named_and_the_others_end(log_every: str, tmp_path: Path) -> None:
    words = ["train", DOTS, "--layout", "ddp", "--device", "cuda", "--nproc-per-node", "2", "--output", str(tmp_path)]
    with launched(
        *words, "--max-restarts", "0", "--log-every", log_every, "--fault", "kill@30:1", pause=0.01
    ) as launch:
        ended = launch.end()
    assert ended.code == 6, ended.errors
    assert "rank 1 (node 0) was killed (SIGKILL)" in ended.errors
    _, record = trained(tmp_path)
    assert (record["status"], record["exit_code"]) == ("failed", 6)
    assert "rank 0 (node 0) lost rank 1 (node 0)" in record["message"]


@pytest.mark.gpu2
def test_a_paused_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    words = ["train", DOTS, "--layout", "ddp", "--device", "cuda", "--nproc-per-node", "2", "--output", str(tmp_path)]
    with launched(*words, "--max-restarts", "0", "--timeout", "10", "--fault", "pause@30:1") as launch:
        ended = launch.end()
    assert ended.code == 6, ended.errors
    assert "rank 1 (node 0) is stopped" in ended.errors
