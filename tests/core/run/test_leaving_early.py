"""Code of the user that would end the process, such as `sys.exit(0)`, leaves a run that says that it is unfinished."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.base.user_code import LeftEarly, user_code
from tests.core.run.test_whose_fault import HEAD
from tests.core.test_bad_input import MODES
from tests.support.commands import ddp, trained
from tests.support.wording import refusing

LEAVES = """
import sys

WHERE, HOW, RANK = os.environ["WHERE"], os.environ["HOW"], os.environ.get("RANK", "0")

def leave(where):
    if where == WHERE and RANK == os.environ["LEAVER"]:
        sys.exit(0) if HOW == "exit" else exec("raise KeyboardInterrupt")

class Net(nn.Linear):
    def forward(self, inputs):
        if self.training:
            leave("model")
        return super().forward(inputs)

class Items:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        leave("data set")
        return torch.full((4,), index / 32), torch.tensor(index % 3)

class Leaves(Callback):
    ranks = "all"

    def on_step(self, moment):
        if moment.step == 3:
            leave("callback")

def model():
    leave("builder")
    return Net(4, 3)

def data():
    return Splits(Items(), Items())

def metrics(outputs, targets):
    leave("metrics")
    return {"n": (1, 1)}

callbacks = [Leaves()]
"""


@pytest.mark.parametrize(
    ("where", "mode", "leaver", "how"),
    [
        ("callback", "single", 0, "exit"),
        ("callback", "single", 0, "interrupt"),
        ("model", "dp", 0, "exit"),
        pytest.param("callback", "torchrun", 1, "exit", marks=pytest.mark.slow),
        pytest.param("callback", "spawn", 1, "exit", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_its_own_code_leaves_is_unfinished(
    where: str, mode: str, leaver: int, how: str, tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text(HEAD + LEAVES)
    settings = {"WHERE": where, "HOW": how, "LEAVER": str(leaver)}
    ended = ddp("train", tmp_path / "leaves.py", *MODES[mode], "--output", tmp_path / "out", env=settings)
    assert ended.code == ExitCode.BAD_INPUT
    last = ended.errors.strip().splitlines()
    said = next(line for line in reversed(last) if line.startswith("ddp: error"))
    raised = "SystemExit: 0" if how == "exit" else "KeyboardInterrupt"
    for words in (f"rank {leaver} (node 0): your {where} left", f"by {raised}", "training is not finished"):
        assert words in said
    _, record = trained(tmp_path / "out")
    assert (record["status"], record["exit_code"]) == ("failed", ExitCode.BAD_INPUT)
    assert f"your {where} left" in record["message"]


@pytest.mark.parametrize("where", ["builder", "data set", "metrics"])
def test_before_training_it_is_an_error_as_well(where: str, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(HEAD + LEAVES)
    settings = {"WHERE": where, "HOW": "exit", "LEAVER": "0"}
    ended = ddp("train", tmp_path / "leaves.py", "--output", tmp_path / "out", env=settings)
    assert ended.code == ExitCode.BAD_INPUT
    assert "by SystemExit: 0, so training is not finished" in ended.errors.strip().splitlines()[-1]


def test_a_true_interrupt_stays_what_it_is() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), user_code("your model"):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with refusing(LeftEarly), user_code("your model"):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
