"""A resume that would not continue the run is found out before the run; what a resume does continue is accepted.

Tests observe/faults.py and run/job.py, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import find_checkpoints, load
from ddp_core.record.directory import find_runs
from tests.core.run.test_repeat import BEGIN
from tests.support.commands import Ended, ddp, trained
from tests.support.layout_cases import ADAMW_MLP, EVERY_NAME

FILES = Path(__file__).with_name("experiment_files")
FILE = FILES / "loses.py"
REHEARSED = ("--rehearsal", "on")
slow = pytest.mark.slow


def run(output: Path, case: str, *words: object, file: object = FILE) -> Ended:
    """How a training of 8 steps ended that saves after every second one."""
    begin = ("train", file, "--device", "cpu", "--output", output, "--checkpoint-every", 2, "--synchronous-save")
    return ddp(*begin, *words, env={"LOSES": case, "CASE": case})


def found(output: Path) -> dict[str, Any]:
    _, record = trained(output)
    return dict(record["attempts"][-1]["guard"])


def test_a_checkpoint_that_no_new_job_can_read_is_said(tmp_path: Path) -> None:
    ended = run(tmp_path, "what nobody reads", *REHEARSED)
    assert ended.code == ExitCode.BAD_INPUT
    assert "a resume would not continue this run" in ended.errors
    assert "KeyError: 'renamed'" in ended.errors
    assert "Traceback" not in ended.errors
    assert list(find_runs(tmp_path)) == [], "it ends before its first step"


CUT = ("--layout", "ddp", "--nproc-per-node", 2, "--shard", "gradients")


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "words"),
    [
        (FILE, CUT[:4]),
        pytest.param(EVERY_NAME, (*CUT, "--guard", "strict"), marks=slow),
        pytest.param(ADAMW_MLP, (*CUT, "--set", "max_steps=5", "--set", "precision=fp16"), marks=slow),
    ],
    ids=["a count that counts not, a cache, a state_dict", "everything of its own, cut", "fp16, cut"],
)
def test_what_a_resume_does_not_lose_is_accepted(tmp_path: Path, file: object, words: tuple[object, ...]) -> None:
    ended = run(tmp_path, "what is no loss", *REHEARSED, *words, file=file)
    assert ended.code == ExitCode.DONE, ended.errors
    assert "rehearsed in " in found(tmp_path)["rehearsal"]
    assert "the same bits" in found(tmp_path)["witness"]


def test_a_callback_goes_on_from_its_state_dict(tmp_path: Path) -> None:
    run(tmp_path, "nothing", "--fault", "exit@5")
    directory, _ = trained(tmp_path)
    assert load(find_checkpoints(directory.checkpoints)[0])["callbacks"] == {"0 CountsOn": {"seen": 4}}
    run(tmp_path, "nothing", "--resume", "auto")
    assert (directory.path / "seen.txt").read_text() == "8"


def test_what_no_checkpoint_can_hold_of_a_callback_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, "what nothing can hold")
    assert ended.code == ExitCode.BAD_INPUT
    assert "callback CountsOn has a state_dict that no checkpoint can hold: state['seen'] is a " in ended.errors


READS_A_FILE = """
from pathlib import Path

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="sum") * float(SCALE.read_text())

SCALE = Path(__file__).with_name("scale.txt")
"""


@pytest.mark.full
def test_a_file_that_was_edited_before_a_resume_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BEGIN + READS_A_FILE, encoding="utf-8")
    (tmp_path / "scale.txt").write_text("1.0")
    words = ("train", tmp_path / "mine.py", "--device", "cpu", *REHEARSED, "--checkpoint-every", 4)
    words = (*words, "--synchronous-save", "--output", tmp_path / "out")
    assert ddp(*words, "--fault", "exit@7").code == 1
    (tmp_path / "scale.txt").write_text("1.5")
    ended = ddp(*words, "--resume", "auto")
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "has made other bits than before the run was interrupted" in ended.errors
    (tmp_path / "scale.txt").write_text("1.0")
    assert ddp(*words, "--resume", "auto").code == ExitCode.DONE


@pytest.mark.full
def test_samples_that_are_random_beside_digested_ones_are_named_and_trained(tmp_path: Path) -> None:
    words = (*REHEARSED, "--set", "epochs=2", "--checkpoint-every", 11)
    ended = run(tmp_path, "noisy but where it is digested", *words, file=FILES / "foreign_code.py")
    assert ended.code == ExitCode.DONE, ended.errors
    said = "training sample 0 is another one at each read, so no result can be repeated to the bit"
    assert found(tmp_path)["rehearsal"].startswith(f"not rehearsed: {said}")
    assert found(tmp_path)["witness"].startswith(f"none: {said}")
