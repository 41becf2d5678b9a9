"""What ends a run is one line with what was wrong and where, and the exit code of its cause.

What the user's code did ends with 2 and is never a fault of ours, also where it leaves by `sys.exit(0)`; torch's raw
errors are put in words.

Tests base/ending.py and trainers/torch_errors.py, too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.base.user_code import LeftEarly, user_code
from tests.core.test_bad_input import MODES, one_line
from tests.support.commands import Ended, ddp, trained, without_limits
from tests.support.processes import HANG
from tests.support.wording import refusing, said_as_before

HEAD = """
import os
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from ddp_core.config.experiment import Component, Experiment
from ddp_core.data.splits import Splits
from ddp_core.observe.callback import Callback

def model():
    return nn.Linear(4, 3)

def label(index):
    return index % 3

def data():
    numbers = torch.Generator().manual_seed(1)
    samples = torch.randn(32, 4, generator=numbers)
    return Splits([(sample, torch.tensor(label(index))) for index, sample in enumerate(samples)])

experiment = Experiment(name="mine", global_batch_size=8, micro_batch=2, epochs=2)
"""
OTHER_WEIGHTS = """
class Changes(Callback):
    ranks = "all"

    def on_step(self, moment):
        if moment.step == 3 and moment.rank == 1:
            with torch.no_grad():
                moment.model.bias += 1

callbacks = [Changes()]
"""
OTHER_WIDTH = """
def model():
    return nn.Linear(4, 3 + int(os.environ["RANK"]))
"""
CHECKPOINTED_TWICE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        found = self.first(inputs)
        for _ in range(2):
            found = checkpoint(self.again, found, use_reentrant=True)
        return self.last(found)

def model():
    return Net()
"""
ONE_WITHOUT = """
def model():
    import os
    if os.environ.get("RANK") == "1":
        raise ValueError("no licence here")
    return nn.Linear(4, 3)
"""
LABEL = """
def label(index):
    return 7 if index in (5, 21) else index % 3
"""
NO_SUM = """
def loss(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")
"""
NO_GRADIENT = """
def loss(outputs, targets):
    return functional.cross_entropy(outputs.detach(), targets, reduction="sum")
"""
IN_DATA = """
class Samples:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if WHEN:
            WHAT
        return torch.zeros(4), torch.tensor(0)

def data():
    return Splits(Samples())
"""
IN_LOADER = IN_DATA.replace("WHEN", "torch.utils.data.get_worker_info() is not None")
RAISES = {
    "data": IN_DATA.replace("WHEN", "index == 7"),
    "model": """
class Network(nn.Linear):
    def forward(self, inputs):
        WHAT

def model():
    return Network(4, 3)
""",
}
NO_LOCKS = """
import errno, fcntl

_flock = fcntl.flock

def flock(descriptor, how):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith("run.lock"):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    return _flock(descriptor, how)

if "RANK" in os.environ:
    fcntl.flock = flock
"""
COMPLEX = """
def model():
    net = nn.Linear(4, 3)
    net.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    return net
"""
NO_RECORD = """
experiment = Experiment(name="mine", global_batch_size=8, evaluation="none")
"""
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

class Leaves(Callback):
    ranks = "all"

    def on_step(self, moment):
        if moment.step == 3:
            leave("callback")

def model():
    leave("builder")
    return Net(4, 3)

callbacks = [Leaves()]
"""


def run(folder: Path, text: str, *words: str, env: dict[str, str] | None = None, begin: str = "") -> Ended:
    (folder / "mine.py").write_text(begin + HEAD + text, encoding="utf-8")
    return ddp("train", folder / "mine.py", "--device", "cpu", *words, "--output", folder / "out", env=env)


def end_of(text: str, mode: str, folder: Path) -> tuple[Ended, str]:
    """How the run ended, and its last `error:` line."""
    ended = run(folder, text, *MODES[mode])
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "fault of ddp itself" not in ended.errors
    return ended, next(line for line in reversed(ended.errors.splitlines()) if line.startswith("ddp: error"))


@pytest.mark.full
@pytest.mark.parametrize(
    "text", [OTHER_WEIGHTS, OTHER_WIDTH, ONE_WITHOUT], ids=["other weights", "other width", "one without"]
)
def test_ranks_that_differ_are_the_users_to_mend(text: str, tmp_path: Path) -> None:
    _, line = end_of(text, "torchrun", tmp_path)
    said_as_before(line)
    if text == OTHER_WEIGHTS:
        assert trained(tmp_path / "out")[1]["exit_code"] == ExitCode.BAD_INPUT


def test_a_layer_that_is_checkpointed_twice_under_ddp(tmp_path: Path) -> None:
    ended, _ = end_of(CHECKPOINTED_TWICE, "torchrun", tmp_path)
    assert ended.errors.count("call checkpoint with use_reentrant=False") > 0
    assert "use_reentrant=False" in trained(tmp_path / "out")[1]["message"]


@pytest.mark.parametrize("mode", ["single", "dp", "torchrun"])
def test_a_label_without_a_class_is_named_with_its_samples(mode: str, tmp_path: Path) -> None:
    ended, line = end_of(LABEL, mode, tmp_path)
    assert "IndexError: Target 7 is out of bounds" in line
    assert "your model's outputs, of shape [2, 3], have no class for it" in line
    assert "sample ids 5" in line or "sample ids 21" in line
    assert "Traceback" not in ended.errors, "no frame of it is the user's"


@pytest.mark.parametrize("mode", ["single", "dp", "torchrun"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NO_SUM, "loss returned a tensor of shape [2]; let it return one number as a tensor of shape []"),
        (NO_GRADIENT, "loss has no gradient, because nothing that is trained leads to it"),
    ],
    ids=["no sum", "no gradient"],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(text: str, said: str, mode: str, tmp_path: Path) -> None:
    ended, line = end_of(text, mode, tmp_path)
    assert said in line
    assert "Traceback" not in ended.errors
    directory, record = trained(tmp_path / "out")
    assert said in record["message"]
    assert '"kind": "step"' not in directory.metrics.read_text()


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        (IN_LOADER.replace("WHAT", 'raise ValueError("one\\ntwo")'), ("--workers", "1"), 2),
        (IN_LOADER.replace("WHAT", "os.kill(os.getpid(), 9)"), ("--workers", "1"), 4),
        (NO_LOCKS, ("--layout", "ddp", "--nproc-per-node", "2"), 4),
        (COMPLEX, (), 2),
        (NO_RECORD, (), 2),
        ("", ("--set", f"epochs={2**63}"), 2),
        ("", ("--stop-signal", "SIGSTOP"), 2),
    ],
    ids=["loader", "killed loader", "no locks", "complex128", "no record", "2**63", "SIGSTOP"],
)
def test_one_line_says_what_was_wrong(text: str, words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    ended = run(tmp_path, text, *words)
    assert ended.code == code
    (line,) = ended.errors.splitlines()
    said_as_before(line)


REFUSED = "raise RuntimeError('S3: connection refused')"


@pytest.mark.parametrize(
    ("where", "mode", "workers", "layer"),
    [
        ("data", "single", "0", ""),
        ("model", "dp", "0", "; in model, Network, which was given [2, 4]"),
        ("data", "torchrun", "1", ""),
        ("model", "torchrun", "0", "; in model, Network, which was given [2, 4]"),
    ],
)
def test_words_of_a_lost_peer_from_the_experiment_are_its_own(
    where: str, mode: str, workers: str, layer: str, tmp_path: Path
) -> None:
    text = RAISES[where].replace("WHAT", REFUSED)
    ended = run(tmp_path, text, *MODES[mode], "--workers", workers)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    (said,) = [line for line in ended.errors.splitlines() if line.startswith("ddp: error: ")]
    place = f"{tmp_path / 'mine.py'}:{(HEAD + text.partition(REFUSED)[0]).count(chr(10)) + 1}"
    assert said.endswith(f"): {place}: RuntimeError: S3: connection refused{layer}")
    assert trained(tmp_path / "out")[1]["attempts"][1:] == [], "it would only be repeated"


@pytest.mark.parametrize(
    ("mode", "where", "what", "reason"),
    [
        ("single", "data", "raise MemoryError()", "out of memory;"),
        ("torchrun", "model", "torch.empty(2**60)", "out of memory (can't allocate memory: you tried to allocate"),
    ],
)
def test_a_want_of_memory_says_what_to_do(mode: str, where: str, what: str, reason: str, tmp_path: Path) -> None:
    ended = run(tmp_path, RAISES[where].replace("WHAT", what), *MODES[mode])
    one_line(ended, ExitCode.RESOURCES, [reason, "rank ", "--set micro_batch=N"])
    assert len(trained(tmp_path / "out")[1]["attempts"]) == 1


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert run(tmp_path, "", "--set", "max_steps=1", begin="\ufeff").code == 0


@pytest.mark.full
def test_where_no_error_can_be_written_the_exit_code_tells_it() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        for words, code in ((["verify", "nothing-here"], ExitCode.BAD_INPUT), (["--help"], ExitCode.RESOURCES)):
            ended = subprocess.run(
                [sys.executable, "-m", "ddp_core", *words],
                stdout=full,
                stderr=full,
                env=without_limits(),
                timeout=HANG,
                check=False,
            )
            assert ended.returncode == code


@pytest.mark.parametrize(
    ("where", "mode", "leaver", "how"),
    [
        ("callback", "single", 0, "exit"),
        ("callback", "single", 0, "interrupt"),
        ("model", "dp", 0, "exit"),
        pytest.param("callback", "torchrun", 1, "exit", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_its_own_code_leaves_is_unfinished(
    where: str, mode: str, leaver: int, how: str, tmp_path: Path
) -> None:
    ended = run(tmp_path, LEAVES, *MODES[mode], env={"WHERE": where, "HOW": how, "LEAVER": str(leaver)})
    assert ended.code == ExitCode.BAD_INPUT
    last = ended.errors.strip().splitlines()
    said = next(line for line in reversed(last) if line.startswith("ddp: error"))
    raised = "SystemExit: 0" if how == "exit" else "KeyboardInterrupt"
    for words in (f"rank {leaver} (node 0): your {where} left", f"by {raised}", "training is not finished"):
        assert words in said
    _, record = trained(tmp_path / "out")
    assert (record["status"], record["exit_code"]) == ("failed", ExitCode.BAD_INPUT)
    assert f"your {where} left" in record["message"]


def test_before_training_it_is_an_error_as_well(tmp_path: Path) -> None:
    ended = run(tmp_path, LEAVES, env={"WHERE": "builder", "HOW": "exit", "LEAVER": "0"})
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
