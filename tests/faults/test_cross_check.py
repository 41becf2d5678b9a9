"""Code that nobody foresaw: found by computing a micro-batch again, on every layout; and nothing harmless is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.record.directory import find_runs
from tests.support.commands import Ended, ddp
from tests.support.layout_cases import FILES

FILE = str(FILES / "foreign_code.py")
SINGLE: tuple[str, ...] = ()
DP = ("--layout", "dp", "--nproc-per-node", "2")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")
DDP3 = ("--layout", "ddp", "--nproc-per-node", "3")
PARAMETERS = (*DDP, "--shard", "parameters")


def run(output: Path, case: str, *words: str) -> Ended:
    common = ("--device", "cpu", "--output", str(output), "--max-restarts", "0")
    return ddp("train", FILE, *words, *common, env={"CASE": case})


def record_in(output: Path) -> dict[str, Any]:
    ((_, record),) = find_runs(output)
    return record


@pytest.mark.parametrize(
    ("case", "layout", "said"),
    [
        ("attribute", SINGLE, "after other passes"),
        pytest.param(*("attribute", DDP, "after other passes"), marks=pytest.mark.slow),
        pytest.param(*("attribute", PARAMETERS, "after other passes"), marks=pytest.mark.slow),
        ("global", SINGLE, "others each time"),
        pytest.param(*("global", DP, "others each time"), marks=pytest.mark.slow),
        ("own generator", DDP, "others each time"),
        pytest.param(*("true randomness", SINGLE, "others each time"), marks=pytest.mark.slow),
        pytest.param(*("clock", DDP, "others each time"), marks=pytest.mark.slow),
        ("rank", DDP, "something else on each rank"),
        pytest.param(*("rank", DDP3, "something else on each rank"), marks=pytest.mark.slow),
        ("closure", DP, "leads to the model itself"),
        pytest.param(*("buffer", SINGLE, "every pass changes the buffer seen"), marks=pytest.mark.slow),
        ("buffer", DP, "every pass changes the buffer seen"),
        pytest.param(*("late", SINGLE, "step 2"), marks=pytest.mark.slow),
    ],
)
def test_it_is_found_before_the_next_save(tmp_path: Path, case: str, layout: tuple[str, ...], said: str) -> None:
    ended = run(tmp_path, case, *layout)
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False), ended.errors
    assert said in ended.errors
    assert "so the result depends on the layout" in ended.errors
    assert record_in(tmp_path)["exit_code"] == ExitCode.BAD_INPUT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["", "cached table", "changes its inputs", "clamps its weights"])
def test_what_ends_with_the_same_bits_is_accepted_in_every_step(tmp_path: Path, case: str) -> None:
    found = set()
    for number, layout in enumerate((SINGLE, DP, DDP3, PARAMETERS)):
        if case == "clamps its weights" and layout is PARAMETERS:
            continue  # refused: the weights that forward sees there are copies
        ended = run(tmp_path / str(number), case, *layout, "--guard", "strict")
        assert ended.code == ExitCode.DONE, (layout, ended.errors)
        record = record_in(tmp_path / str(number))
        assert record["attempts"][-1]["guard"]["checks"] == record["result"]["steps"] == 12
        found.add(record["weights_sha256"])
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DDP, PARAMETERS])
def test_an_attribute_that_a_callback_sets_alike_everywhere_is_lost_by_a_resume(
    tmp_path: Path, layout: tuple[str, ...]
) -> None:
    ended = run(tmp_path, "callback", *layout)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "a resume would not continue this run" in ended.errors
    assert "attribute temperature (0.25 in the run, none after reading)" in ended.errors


def test_with_warn_it_goes_on_and_the_record_says_so(tmp_path: Path) -> None:
    ended = run(tmp_path, "attribute", *DDP, "--on-difference", "warn")
    assert ended.code == ExitCode.DONE, ended.errors
    record = record_in(tmp_path)
    assert record["promise_broken"]["step"] == 1
    assert (ended.output + ended.errors).count("the run goes on as asked, and its record says so") == 1


def test_random_data_are_warned_of_and_refused_by_strict(tmp_path: Path) -> None:
    ended = run(tmp_path / "normal", "noisy data", *DDP)
    assert ended.code == ExitCode.DONE, ended.errors
    said = "are not the same when read again in step 1, so no result can be repeated to the bit"
    assert (ended.output + ended.errors).count(said) == 1
    record = record_in(tmp_path / "normal")
    assert record["data_sha256"] is None
    assert record["attempts"][-1]["guard"]["not computed again"] == "samples come out differently at each read"
    ended = run(tmp_path / "strict", "noisy data", "--guard", "strict")
    assert (ended.code, said in ended.errors) == (ExitCode.BAD_INPUT, True)


def test_with_the_guard_off_nothing_is_found(tmp_path: Path) -> None:
    assert run(tmp_path, "attribute", *DDP, "--guard", "off").code == ExitCode.DONE
    assert record_in(tmp_path)["attempts"][-1]["guard"] == {"mode": "off", "seconds": {}}


def test_the_plain_reduction_promises_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "own generator", *DDP, "--reduction", "plain").code == ExitCode.DONE


@pytest.mark.parametrize(
    ("fault", "words", "said"),
    [
        # The first micro-batch of the step, which the guard checks in its first step.
        ("flip@1:0", DDP, "rank 0 (node 0), cpu has computed it wrongly once"),
        ("flip@3:1", (*DDP, "--guard", "strict"), "rank 1 (node 0), cpu has computed it wrongly once"),
        pytest.param("flip@3:2", (*DDP3, "--guard", "strict"), "rank 2 (node 0)", marks=pytest.mark.slow),
        pytest.param("flip@2+:2", DDP3, "rank 2 (node 0), cpu computes it wrongly", marks=pytest.mark.slow),
        ("flip@2+:1", DDP, "one of rank 0 (node 0), cpu and rank 1 (node 0), cpu computes it wrongly"),
        pytest.param("flip@1:0", SINGLE, "rank 0 (node 0), cpu has computed it wrongly once", marks=pytest.mark.slow),
        pytest.param("flip@1+:1", PARAMETERS, "computes it wrongly", marks=pytest.mark.slow),
    ],
)
def test_a_machine_that_computes_wrongly_is_named(
    tmp_path: Path, fault: str, words: tuple[str, ...], said: str
) -> None:
    ended = run(tmp_path, "", *words, "--fault", fault)
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.RESOURCES, False), ended.errors
    assert said in ended.errors
    assert "suspect its memory, processor or accelerator" in ended.errors


@pytest.mark.slow
def test_one_flip_in_a_micro_batch_that_is_not_checked_is_not_seen(tmp_path: Path) -> None:
    assert run(tmp_path, "", *DDP, "--fault", "flip@3:1").code == ExitCode.DONE


def test_a_model_that_asks_whether_it_is_cut_is_refused_by_name(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--output", str(tmp_path), "--max-restarts", "0")
    ended = ddp("train", FILES / "asks_whether_cut.py", *PARAMETERS, *words)
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False), ended.errors
    assert "the loss has other bits since --shard parameters has cut the model" in ended.errors
