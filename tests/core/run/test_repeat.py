"""A run whose steps, trained again elsewhere, have other bits is refused before it begins or before it is completed."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.record.directory import RunDirectory, find_runs
from ddp_core.run.job import OverSocket
from tests.support.commands import Ended, ddp, wait_until, without_limits
from tests.support.processes import HANG

BEGIN = """
import torch
import torch.distributed as dist
from torch import nn
from ddp_core import Callback, Experiment, InMemory, Splits

def data(size: int = 80):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 8, generator=generator)
    targets = (inputs.sum(1) > 0).long()
    return Splits(InMemory(inputs, targets), InMemory(inputs[:18], targets[:18]))

def model():
    return nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Dropout(0.1), nn.Linear(7, 2))

experiment = Experiment(name="mine", global_batch_size=16, micro_batch=4, epochs=3)
"""
RANKS_IN_RATE = """
def optimizer(model, lr: float = 0.05):
    return torch.optim.SGD(model.parameters(), lr=lr * (dist.get_world_size() if dist.is_initialized() else 1))
"""
MOMENTUM_ON_RANK_0 = """
class Warm(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == 12 and dist.is_initialized() and dist.get_rank() == 0:
            self.param_groups[0]["momentum"] = 0.5

def optimizer(model, lr: float = 0.05):
    return Warm(model.parameters(), lr=lr, momentum=0.9)
"""
CUT_BY_A_NORM = """
def model():  # large enough for a cut, which lies between blocks of 1024 elements
    return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 2))

class Own(torch.optim.SGD):
    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.sub_(weight.grad * weight.norm(), alpha=0.1)

def optimizer(model, lr: float = 0.1):
    return Own(model.parameters(), lr=lr)
"""
DATA_OF_THE_DAY = """
import time
import numpy as np

def data():
    generator = np.random.default_rng(int(time.time()) // 86400)
    inputs = torch.from_numpy(generator.standard_normal((80, 8)).astype("float32"))
    return Splits(InMemory(inputs, (inputs.sum(1) > 0).long()))
"""
CHANGED_AFTER_A_STEP = """
LEVEL = {"level": 0.0}

class Items(InMemory):
    def __getitems__(self, ids):
        inputs, targets = super().__getitems__(ids)
        return inputs * (1 + LEVEL["level"]), targets

class Harder(Callback):
    ranks = "all"

    def on_step(self, moment):
        LEVEL["level"] += 0.25

    def state_dict(self):
        return dict(LEVEL)

    def load_state_dict(self, state):
        LEVEL.update(state)

_data = data

def data():
    train = _data().train
    return Splits(Items(train.inputs, train.targets))

callbacks = [Harder()]
"""
RANKS_ALONE = """
_model = model

def model():
    if not dist.is_initialized():
        raise ValueError("this is for ranks")
    return _model()
"""
SCALED_BY_RANK = """
from torch.nn import functional

class Scale(nn.Module):
    def forward(self, inputs):
        return functional.softplus(inputs * (1 + 2.0**-10 * (dist.get_rank() if dist.is_initialized() else 0)))

_model = model

def model():
    return nn.Sequential(_model(), Scale())
"""
TWO = ("--layout", "ddp", "--nproc-per-node", "2")
FIRST, TWICE = "first in step ", "One process trained twice has other bits, too"
full, slow = pytest.mark.full, pytest.mark.slow


def trained(folder: Path, text: str, *words: str) -> Ended:
    (folder / "mine.py").write_text(BEGIN + text, encoding="utf-8")
    begin = ("train", folder / "mine.py", "--device", "cpu", "--rehearsal", "on", "--output", folder / "out")
    return ddp(*begin, *words)


def only_run(folder: Path) -> RunDirectory:
    (found,) = [directory for directory, _ in find_runs(folder / "out")]
    return found


@pytest.mark.full
@pytest.mark.parametrize("words", [(), TWO], ids=["single", "ddp"])
def test_a_healthy_run_is_rehearsed_once_and_has_a_witness(tmp_path: Path, words: tuple[str, ...]) -> None:
    first = trained(tmp_path, "", *words)
    assert first.code == 0, first.errors
    assert "rehearsed in " in first.errors
    guard = only_run(tmp_path).read()["attempts"][-1]["guard"]
    assert "rehearsed in " in guard["rehearsal"]
    assert "the same bits" in guard["witness"]
    again = trained(tmp_path, "", *words)
    assert again.code == 0
    assert "rehearsed on " in again.errors


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        pytest.param(CUT_BY_A_NORM, (*TWO, "--shard", "optimizer"), FIRST, id="a rule that is not elementwise"),
        pytest.param(RANKS_IN_RATE, TWO, FIRST, id="the number of ranks", marks=full),
        (SCALED_BY_RANK, TWO, "; there the result of aten.mul.Tensor in 1 (Scale), in micro-batch"),
        pytest.param(DATA_OF_THE_DAY, (), TWICE, id="data of the clock, in days", marks=full),
        pytest.param(
            *(CHANGED_AFTER_A_STEP, (*TWO, "--workers", "2"), "With --workers 0 all steps are the same"),
            id="what loader processes do not share",
            marks=slow,
        ),
    ],
)
def test_other_bits_in_the_miniature_refuse_the_run(
    tmp_path: Path, text: str, words: tuple[str, ...], said: str
) -> None:
    ended = trained(tmp_path, text, *words)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert said in ended.errors
    assert list(find_runs(tmp_path / "out")) == []


@pytest.mark.full
def test_the_order_of_a_set_is_the_same_in_all_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise ValueError(hash('a name'))\n")
    environment = {name: value for name, value in without_limits().items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "ddp_core", "train", str(tmp_path / "mine.py"), "--device", "cpu"]
    one, other = (subprocess.run(command, env=environment, capture_output=True, timeout=HANG) for _ in range(2))
    assert b"ValueError" in one.stderr
    assert one.stderr == other.stderr


@pytest.mark.full
def test_a_run_that_shall_go_on_is_marked(tmp_path: Path) -> None:
    ended = trained(tmp_path, RANKS_IN_RATE, *TWO, "--on-difference", "warn")
    assert ended.code == 0
    assert only_run(tmp_path).read()["promise_broken"]["step"] == 0


@pytest.mark.full
def test_what_one_process_refuses_trains_unrehearsed_and_says_why(tmp_path: Path) -> None:
    ended = trained(tmp_path, RANKS_ALONE, *TWO)
    assert ended.code == 0, ended.errors
    assert "not rehearsed: the miniature on one process ended with 2: " in ended.errors
    assert "this is for ranks" in ended.errors


@pytest.mark.parametrize(
    ("fault", "words", "found"),
    [
        ("flip@6:0", ("--guard", "strict"), "step 6, trained again on one process from the checkpoint of step 5"),
        pytest.param("flip@3+:1", TWO, "from the checkpoint of step 10", marks=slow),
    ],
)
def test_a_machine_that_computes_wrongly_is_found_by_a_witness(
    tmp_path: Path, fault: str, words: tuple[str, ...], found: str
) -> None:
    """Strict asks before the next save, else the last witness finds what lasts."""
    ended = trained(tmp_path, "", *words, "--fault", fault, "--max-restarts", "0")
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False)
    assert found in ended.errors
    assert "the run kept something that no checkpoint holds, or a machine computed wrongly" in ended.errors
    assert only_run(tmp_path).read()["status"] == "failed"


@pytest.mark.full
def test_one_ranks_numbers_that_change_late_are_found_before_the_next_save(tmp_path: Path) -> None:
    ended = trained(tmp_path, MOMENTUM_ON_RANK_0, *TWO, "--max-restarts", "0")
    assert ended.code == ExitCode.BAD_INPUT
    assert "optimizer group 0.momentum is not the same on all ranks" in ended.errors
    assert "the checkpoint of step 10 is good" in ended.errors


@pytest.mark.full
def test_a_rehearsal_ends_with_the_command(tmp_path: Path) -> None:
    slow = f"import time\n\ndef loss(outputs, targets):\n    time.sleep({HANG})\n"
    (tmp_path / "mine.py").write_text(BEGIN + slow, encoding="utf-8")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = ["train", str(tmp_path / "mine.py"), "--device", "cpu", "--rehearsal", "on"]
    command = [sys.executable, "-m", "ddp_core", *words, "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, env={**without_limits(), "TMPDIR": str(scratch)}) as process:
        wait_until(lambda: any(scratch.glob("ddp-*/rehearsal/single/rank-0.log")), HANG, "the miniature begins")
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
    wait_until(lambda: not any(_lives(child) for child in children), HANG, "its processes end")
    wait_until(lambda: not any(scratch.glob("ddp-*")), HANG, "its folder goes")


def test_a_question_does_not_wait_for_a_repeater_that_answers_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_REPEATER", "repeater")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("repeater")
        listener.listen()
        witness = OverSocket(tmp_path)
        witness.ask(5, {6: {f"weight {number}": "0" * 16 for number in range(50_000)}})
        assert witness.answer(0.0) is None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
