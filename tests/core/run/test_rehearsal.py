"""A resume that would not continue the run is found out by the run, and named; what a resume does continue is not."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import find_checkpoints, load
from ddp_core.record.directory import RunDirectory
from ddp_core.run import rehearsing, resumed_step
from ddp_core.trainers import rehearsal
from ddp_core.trainers.next_step import Facts, Verdict
from tests.support import quick
from tests.support.commands import Ended, ddp, trained
from tests.support.layout_cases import ADAMW_MLP, FILES, WHOLE_JOB

FILE = FILES / "loses.py"


def rehearsed(
    output: Path, loses: str, *words: object, file: object = FILE, module: str = "tests.support.quick"
) -> tuple[Ended, dict[str, Any]]:
    """How a training that saves after step 2 of 8 ended, and the record."""
    words = ("train", file, "--device", "cpu", "--output", output, "--checkpoint-every", 2, *words)
    if module != "ddp_core.cli":
        words = (*words, "--synchronous-save")  # no thread writes where the rehearsal is a fork
    ended = ddp(*words, env={"LOSES": loses}, module=module)
    directory, record = trained(output)
    assert not (directory.path / "rehearsal").exists()
    return ended, record


def verdict(record: dict[str, Any]) -> str:
    return str(record["attempts"][-1]["guard"]["resume"])


@pytest.mark.parametrize(
    ("loses", "guard", "said"),
    [
        (
            "attribute",
            "normal",
            "given the same gradient, gives other bits in step 3 (first: parameter 0.weight). The optimizer's "
            "attribute t (2 in the run, 0 after reading) is in no checkpoint: keep it in `state` or in param_groups",
        ),
        (
            "of the schedule",
            "normal",
            "gives other bits in step 3 (first: the learning rate of group 0). The schedule's attribute moves (3 in "
            "the run, 1 after reading) is in no checkpoint: keep it in `state`",
        ),
        (
            "of the model",
            "normal",
            "gives another gradient of micro-batch 0 in step 3. The model's attribute count (2 in the run, 0 after "
            "reading) is in no checkpoint: keep it in a buffer, or return it from get_extra_state",
        ),
        (
            "global of the optimizer",
            "strict",
            "gives other bits in step 3 (first: parameter 0.weight). ",
        ),
        (
            "global of the model",
            "strict",
            "gives another gradient of micro-batch 0 in step 3. ",
        ),
    ],
)
def test_what_a_resume_would_lose_ends_the_run_before_its_next_save(
    tmp_path: Path, loses: str, guard: str, said: str
) -> None:
    ended, record = rehearsed(tmp_path, loses, "--guard", guard)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "a resume would not continue this run: the checkpoint of step 2, read into a new job" in ended.errors
    assert said in ended.errors
    assert "Traceback" not in ended.errors
    directory, _ = trained(tmp_path)
    assert [each.step for each in find_checkpoints(directory.checkpoints)] == [2]
    assert verdict(record) == "rehearsed at step 2: a resume would not continue this run"
    assert record["attempts"][-1]["guard"]["seconds"]["resume rehearsal"] > 0


def test_a_checkpoint_that_no_new_job_can_read_ends_the_run(tmp_path: Path) -> None:
    ended, _ = rehearsed(tmp_path, "what nobody reads")
    assert ended.code == ExitCode.BAD_INPUT
    assert "the checkpoint of step 2 cannot be read into a new job: KeyError: 'renamed'" in ended.errors


def test_a_job_that_cannot_be_built_again_is_not_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    facts = {"directory": str(tmp_path), "threads": 1, "device": "cpu", "step": 2, "micro_batch": None, "after": {}}
    assert resumed_step.rehearse(tmp_path, facts) == Verdict(
        failed="a new process cannot build the job (KeyError: 'file')"
    )


def test_a_rehearsal_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request: Any = SimpleNamespace(to_json=lambda: "{}")
    monkeypatch.setattr(rehearsing, "_LEAST_LIMIT", 0.2)
    monkeypatch.setattr(rehearsing, "start_interpreter", lambda _: subprocess.Popen(["sleep", "60"]))
    with closing(rehearsing.FreshProcess(request, RunDirectory(tmp_path), torch.device("cpu"), 0.0)) as process:
        process.keep({"weight": torch.zeros(2)})
        process.start(Facts(2, None, {}, in_background=False))
        assert process.verdict(0.01) is None
        while (verdict := process.verdict(0.05)) is None:
            pass
        assert verdict.failed == "it took longer than 0 s"
    assert not (tmp_path / "rehearsal").exists()


def test_with_on_difference_warn_it_goes_on_and_the_record_says_so(tmp_path: Path) -> None:
    ended, record = rehearsed(tmp_path, "attribute", "--on-difference", "warn")
    assert ended.code == ExitCode.DONE
    assert ended.output.count("warning: a resume would not continue this run") == 1
    assert record["promise_broken"]["step"] == 3
    assert "The optimizer's attribute t" in record["promise_broken"]["what"]
    assert record["status"] == "completed"


@pytest.mark.parametrize(
    ("loses", "guard", "said"),
    [
        ("nothing", "off", None),
        ("nothing", "strict", "rehearsed at step 2: the same"),
        ("a harmless count", "normal", "rehearsed at step 2: the same"),
        ("a harmless count", "strict", "rehearsed at step 2: the same"),
        ("in a cache", "strict", "rehearsed at step 2: the same"),
        ("in its state_dict", "strict", "rehearsed at step 2: the same"),
    ],
)
def test_what_a_resume_does_not_lose_is_accepted(tmp_path: Path, loses: str, guard: str, said: str | None) -> None:
    ended, record = rehearsed(tmp_path, loses, "--guard", guard)
    assert (ended.code, ended.errors) == (ExitCode.DONE, "")
    assert record["attempts"][-1]["guard"].get("resume") == said


def test_a_short_run_without_a_suspicion_pays_for_no_rehearsal(tmp_path: Path) -> None:
    ended, record = rehearsed(tmp_path, "nothing")
    assert (ended.code, ended.errors) == (ExitCode.DONE, "")
    assert verdict(record) == (
        "not rehearsed: the run is short, and no attribute has changed that its checkpoints do not hold"
    )


def test_a_run_that_saves_at_its_end_alone_has_nothing_to_rehearse(tmp_path: Path) -> None:
    ended, record = rehearsed(tmp_path, "attribute", "--guard", "strict", "--checkpoint-every", 8)
    assert (ended.code, ended.errors) == (ExitCode.DONE, "")
    assert verdict(record) == "not rehearsed: no step came after a save"


def main(words: Sequence[str]) -> int:
    """`ddp` for which every run is long."""
    rehearsal._WORTH = 0
    return quick.main(words)


@pytest.mark.parametrize(
    ("loses", "every", "seen"),
    [("nothing", 2, 2), pytest.param("nothing", 7, 7, marks=pytest.mark.slow), ("attribute", 2, 2)],
)
def test_a_long_run_is_rehearsed_while_it_goes_on(tmp_path: Path, loses: str, every: int, seen: int) -> None:
    module, words = "tests.core.run.test_rehearsal", ["--checkpoint-every", every, "--keep-last", 1]
    hidden = {"attribute": "global of the optimizer"}.get(loses, loses)
    ended, record = rehearsed(tmp_path, hidden, *words, module=module)
    # The verdict is awaited before the save that would remove the checkpoint, or the end.
    assert (ended.code, record["exit_code"]) == ((0, 0) if loses == "nothing" else (2, 2)), verdict(record)
    assert verdict(record).startswith(f"rehearsed at step {seen}: ")
    assert "gives other bits in step 3" in ended.errors or loses == "nothing"


def test_what_a_callback_keeps_in_an_attribute_is_said_once(tmp_path: Path) -> None:
    ended, _ = rehearsed(tmp_path, "of a callback")
    assert ended.code == ExitCode.DONE
    assert ended.errors.splitlines() == [
        "warning: callback Counts keeps `seen` in an attribute, which no checkpoint holds: a resumed run starts with "
        "it anew; let its state_dict return it, and load_state_dict take it"
    ]


@pytest.mark.parametrize(("loses", "counted"), [("nothing", "8"), ("of a callback", "4")])
def test_a_callback_goes_on_from_its_state_dict(tmp_path: Path, loses: str, counted: str) -> None:
    rehearsed(tmp_path, loses, "--fault", "exit@5")
    directory, _ = trained(tmp_path)
    assert load(find_checkpoints(directory.checkpoints)[0])["callbacks"] == (
        {"0 CountsOn": {"seen": 4}} if loses == "nothing" else {}
    )
    rehearsed(tmp_path, loses, "--resume", "auto")
    assert (directory.path / "seen.txt").read_text() == counted


def test_what_no_checkpoint_can_hold_of_a_callback_is_refused(tmp_path: Path) -> None:
    ended, _ = rehearsed(tmp_path, "what nothing can hold")
    assert ended.code == ExitCode.BAD_INPUT
    assert "callback CountsOn has a state_dict that no checkpoint can hold: state['seen'] is a " in ended.errors


ACCEPTED = {
    "ddp x 2": [FILE, "--layout", "ddp", "--nproc-per-node", 2],
    "dp x 2": [FILE, "--layout", "dp", "--nproc-per-node", 2],
    "everything of its own": [WHOLE_JOB, "--layout", "ddp", "--nproc-per-node", 2],
    "everything of its own, cut": [WHOLE_JOB, "--layout", "ddp", "--nproc-per-node", 2, "--shard", "gradients"],
    "AdamW, clipping, cosine, averages": [ADAMW_MLP, "--set", "ema_decay=0.9", "--set", "max_steps=5"],
    "the same, optimizer cut": [
        *(ADAMW_MLP, "--set", "ema_decay=0.9", "--set", "max_steps=5"),
        *("--layout", "ddp", "--nproc-per-node", 2, "--shard", "optimizer"),
    ],
    "parameters cut": [ADAMW_MLP, "--set", "max_steps=5", "--layout", "ddp", "--shard", "parameters"],
    "bf16": [ADAMW_MLP, "--set", "max_steps=5", "--set", "precision=bf16"],
    "fp16": [ADAMW_MLP, "--set", "max_steps=5", "--set", "precision=fp16"],
    "fp16, cut": [
        *(ADAMW_MLP, "--set", "max_steps=5", "--set", "precision=fp16"),
        *("--layout", "ddp", "--nproc-per-node", 2, "--shard", "gradients"),
    ],
    "channels last": ["digits", "--set", "max_steps=3", "--set", "memory_format=channels_last"],
    "digits, ddp": ["digits", "--set", "max_steps=3", "--layout", "ddp", "--nproc-per-node", 2],
    "toy_mlp, dp": ["toy_mlp", "--layout", "dp", "--nproc-per-node", 2],
    "a transformer": ["char_transformer", "--set", "max_steps=3", "--set", "global_batch_size=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ACCEPTED)
def test_strict_accepts_what_goes_on_alike(tmp_path: Path, case: str) -> None:
    file, *words = ACCEPTED[case]
    ended, record = rehearsed(
        tmp_path, "a harmless count", "--guard", "strict", *words, file=file, module="ddp_core.cli"
    )
    assert ended.code == ExitCode.DONE, ended.errors
    assert verdict(record) == "rehearsed at step 2: the same"


@pytest.mark.slow
def test_every_rank_ends_where_a_resume_would_lose_something(tmp_path: Path) -> None:
    words = ["--layout", "ddp", "--nproc-per-node", 2, "--max-restarts", 0]
    ended, record = rehearsed(tmp_path, "attribute", *words, module="ddp_core.cli")
    assert ended.code == ExitCode.BAD_INPUT
    assert ended.errors.count("The optimizer's attribute t (2 in the run, 0 after reading)") == 1
    assert (record["status"], record["exit_code"]) == ("failed", ExitCode.BAD_INPUT)
