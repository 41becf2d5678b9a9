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
from ddp_core.run.asking import OverSocket
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
def optimizer(model, lr: float = 0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

class Warm(Callback):
    ranks = "all"

    def on_step(self, moment):
        if moment.rank == 0 and moment.step == 4:
            for group in OPTIMIZERS[0].param_groups:
                group["momentum"] = 0.5

OPTIMIZERS = []
_made = optimizer

def optimizer(model, lr: float = 0.05):
    OPTIMIZERS[:] = [_made(model, lr)]
    return OPTIMIZERS[0]

callbacks = [Warm()]
"""
LATE = """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.forwards = 0

    def forward(self, inputs):
        if self.training:
            self.forwards += 1
        return self.layer(inputs) * (1.5 if self.forwards > 44 else 1.0)

def model():
    return Late()
"""
SET_OF_NAMES = """
_data = data

def data():
    order = [int(name) for name in {str(number) for number in range(80)}]
    inputs, targets = _data().train.inputs[order], _data().train.targets[order]
    return Splits(InMemory(inputs, targets))
"""
RANKS_ALONE = """
_model = model

def model():
    if not dist.is_initialized():
        raise ValueError("this is for ranks")
    return _model()
"""
TWO = ("--layout", "ddp", "--nproc-per-node", "2")


def trained(folder: Path, text: str, *words: str) -> Ended:
    (folder / "mine.py").write_text(BEGIN + text, encoding="utf-8")
    begin = ("train", folder / "mine.py", "--device", "cpu", "--rehearsal", "on", "--output", folder / "out")
    return ddp(*begin, *words)


def only_run(folder: Path) -> RunDirectory:
    (found,) = [directory for directory, _ in find_runs(folder / "out")]
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="single"),
        pytest.param(TWO, id="ddp"),
        pytest.param((*TWO, "--shard", "parameters"), id="parameters", marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RANKS_IN_RATE, TWO),
        (MOMENTUM_ON_RANK_0, TWO),
        pytest.param(MOMENTUM_ON_RANK_0, (*TWO, "--shard", "optimizer"), marks=pytest.mark.slow),
    ],
    ids=["the number of ranks", "one rank's numbers", "one rank's numbers, cut"],
)
def test_other_bits_in_the_miniature_refuse_the_run(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    ended = trained(tmp_path, text, *words)
    assert ended.code == ExitCode.BAD_INPUT
    assert "first in step " in ended.errors
    assert list(find_runs(tmp_path / "out")) == []


@pytest.mark.slow
def test_the_order_of_a_set_is_the_same_in_all_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BEGIN + SET_OF_NAMES, encoding="utf-8")
    environment = {name: value for name, value in without_limits().items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "ddp_core", "train", str(tmp_path / "mine.py"), "--device", "cpu"]
    for _ in range(2):
        subprocess.run([*command, "--output", str(tmp_path / "out")], env=environment, check=True, timeout=HANG)
    assert len({record["weights_sha256"] for _, record in find_runs(tmp_path / "out")}) == 1


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


def test_what_acts_late_is_found_by_the_witness(tmp_path: Path) -> None:
    """The count acts in the twelfth step: the miniature has ten, and a resume begins to count anew."""
    ended = trained(tmp_path, LATE, "--set", "epochs=4", "--checkpoint-every", "11")
    assert ended.code == ExitCode.BAD_INPUT
    assert "trained again on one process from the checkpoint" in ended.errors
    assert only_run(tmp_path).read()["status"] == "failed"


@pytest.mark.parametrize(
    ("fault", "words", "found"),
    [
        ("flip@6:0", ("--guard", "strict"), "step 6, trained again on one process from the checkpoint of step 5"),
        pytest.param("flip@6:1", (*TWO, "--guard", "strict"), "from the checkpoint of step 5", marks=pytest.mark.slow),
        pytest.param("flip@3+:0", (), "from the checkpoint of step 10", marks=pytest.mark.slow),
        pytest.param("flip@3+:1", TWO, "from the checkpoint of step 10", marks=pytest.mark.slow),
        pytest.param(
            *("flip@3+:1", (*TWO, "--shard", "parameters"), "from the checkpoint of step 10"), marks=pytest.mark.slow
        ),
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


@pytest.mark.full
@pytest.mark.parametrize("shard", ["none", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_one_ranks_numbers_that_change_late_are_found_before_the_next_save(tmp_path: Path, shard: str) -> None:
    late = MOMENTUM_ON_RANK_0.replace("moment.step == 4", "moment.step == 12")
    ended = trained(tmp_path, late, *TWO, "--shard", shard, "--max-restarts", "0")
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


MODEL = """
import os, random, time
import numpy as np

_model = model

def model():
    {}
    return _model()
"""
DATA = """
import time
import numpy as np

def data():
    inputs = torch.from_numpy({}.standard_normal((80, 8)).astype("float32"))
    return Splits(InMemory(inputs, (inputs.sum(1) > 0).long()))
"""
# The first of each kind is fast enough to be tried each time.
OTHERWISE = {
    "the clock, in seconds": (MODEL.format("torch.manual_seed(int(time.time()))"), ()),
    "data of the clock, in days": (DATA.format("np.random.default_rng(int(time.time()) // 86400)"), ()),
    "the clock, on two ranks": (MODEL.format("torch.manual_seed(int(time.time()))"), TWO),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if number < 2 else [pytest.mark.slow], id=name)
        for number, name in enumerate(OTHERWISE)
    ],
)
def test_what_is_built_otherwise_in_another_process_refuses_the_run(case: str, tmp_path: Path) -> None:
    text, words = OTHERWISE[case]
    ended = trained(tmp_path, text, *words)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "One process trained twice has other bits, too" in ended.errors
    assert list(find_runs(tmp_path / "out")) == []


ITEMS = """
LEVEL = {{"level": 0.0}}

class Items(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.kept = inputs, targets, {{}}

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        {}

_data = data

def data():
    train = _data().train
    return Splits(Items(train.inputs, train.targets))
"""
CHANGED = ITEMS.format('return self.inputs[index] * (1 + LEVEL["level"]), self.targets[index]')
CALLBACK = """
class Harder(Callback):
    ranks = "all"

    def {}(self, moment):
        LEVEL["level"] += 0.25

    def state_dict(self):
        return dict(LEVEL)

    def load_state_dict(self, state):
        LEVEL.update(state)

callbacks = [Harder()]
"""
CASES = {
    "a draw that is kept": ITEMS.format(
        """
        if index not in self.kept:
            self.kept[index] = self.inputs[index] + 0.3 * torch.randn(8)
        return self.kept[index], self.targets[index]
        """
    ),
    "changed after a step": CHANGED + CALLBACK.format("on_step"),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_what_loader_processes_do_not_share_refuses_the_run(case: str, tmp_path: Path) -> None:
    ended = trained(tmp_path, CASES[case], *TWO, "--workers", "2")
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "first in step " in ended.errors
    assert ("With --workers 0 all steps are the same" in ended.errors) == case.startswith("changed")
