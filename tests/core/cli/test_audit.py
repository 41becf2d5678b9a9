"""What `ddp audit` says: of an honest run, on any layout, and of runs that something was changed in."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from ddp_core.cli.audit import claims, drawn, needed_draws, passing, segments_of
from tests.support.commands import ddp, train, trained
from tests.support.layout_cases import ADAMW_MLP
from tests.support.wording import said_as_before

# 26 steps, of which every 5th is kept: segments of 5, 5, 5, 5, 5 and 1 steps.
WORDS = (ADAMW_MLP, "--set", "max_steps=26", "--keep-for-audit", "6")
ENDS = [5, 10, 15, 20, 25, 26]


def audit(run: Path, *words: object, code: int = 0) -> str:
    """What `ddp audit` says, which ends with this code."""
    ended = ddp("audit", run, *words, module="tests.support.quick")
    assert ended.code == code, ended.output + ended.errors
    return ended.output + ended.errors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one process."""
    output = tmp_path_factory.mktemp("audited")
    train(output, *WORDS)
    return trained(output)[0].path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def edit(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a run's run.json."""
    document = json.loads((run / "run.json").read_text())
    change(document)
    (run / "run.json").write_text(json.dumps(document))


@pytest.mark.full
def test_an_honest_run_passes_and_the_report_says_what_that_proves(run: Path) -> None:
    record = hashlib.sha256((run / "run.json").read_bytes()).hexdigest()
    said = audit(run, "--segments", 2, "--seed", 1, "--record-sha256", record)
    assert f"26 steps, 6 kept states; sha256 {record}" in said
    assert said.count(": the same\n") == 2
    assert "with 1 of 6 segments forged it would have passed with probability 66.7 %" in said
    assert said.endswith("passed: what was looked at is what the record says\n")


def test_every_segment_passes_on_another_layout(run: Path) -> None:
    """Also that which begins anew, and those where an epoch or the run ends."""
    told = json.loads(audit(run, "--segments", 6, "--layout", "dp", "--nproc-per-node", 2, "--json"))
    assert (told["format"], told["passed"], told["segments"], len(told["drawn"])) == ("ddp-audit/1", True, 6, 6)


@pytest.mark.parametrize(
    ("forge", "verdict"),
    [
        (lambda record: record["result"].update(test_accuracy=0.999), "different figures: evaluated again, test_"),
        (lambda record: record.update(weights_sha256="ab" * 32), "different record: the state that run.json notes"),
        (lambda record: record["source"]["files"].update({"adamw_mlp.py": "ab" * 32}), "different code: "),
        (lambda record: record.update(data_sha256="ab" * 32), "different data: "),
    ],
    ids=["figure", "digest of the weights", "code", "data"],
)
def test_what_shows_without_training_is_named(copy: Path, forge: Callable[[dict[str, Any]], Any], verdict: str) -> None:
    edit(copy, forge)
    said = audit(copy, "--segments", 1, code=1)
    assert verdict in said
    assert "replayed" not in said


@pytest.mark.full
def test_steps_that_nobody_can_repeat_are_found_where_their_segment_is_drawn(tmp_path: Path) -> None:
    train(tmp_path, *WORDS, "--fault", "flipweight@12", "--guard", "off")
    said = audit(trained(tmp_path)[0].path, "--segments", 6, code=1)
    assert said.endswith("different segment 3: steps 11 to 15, trained again, end with other weights\n")


@pytest.mark.parametrize(
    ("is_gone", "verdict"),
    [(True, "segment 2 cannot begin"), (False, "that of step 5 is not the one that run.json notes")],
    ids=["gone", "another"],
)
def test_a_checkpoint_that_is_gone_or_another_one_is_named(copy: Path, is_gone: bool, verdict: str) -> None:
    if is_gone:
        (copy / "checkpoints" / "step-000000005.pt").unlink()
    else:
        edit(copy, lambda record: record["kept"]["states"][0].update(state_sha256="ab" * 32))
    record = hashlib.sha256((copy / "run.json").read_bytes()).hexdigest()
    seed = next(seed for seed in range(99) if drawn(segments_of(ENDS), 1, seed, record)[0].number == 2)
    said = audit(copy, "--segments", 1, "--seed", seed, code=1)
    assert f"different checkpoint: {verdict}" in said


def test_the_digest_of_the_record_that_was_given_before_the_draw_is_compared(run: Path) -> None:
    said = audit(run, "--record-sha256", "ab" * 32, code=1)
    assert "and not that which was given before" in said


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(kept=None),
        lambda record: record.update(kept=None, chain={"head": "ab" * 32, "step": 26}),
        # One long segment among many short ones would hardly ever be drawn.
        lambda record: record["kept"]["states"].pop(0),
        lambda record: record["kept"]["states"].append(record["kept"]["states"][-1]),
        lambda record: record.update(fingerprint_changed=True),
    ],
    ids=["none", "older", "fewer", "twice", "fingerprint"],
)
def test_a_run_that_cannot_be_audited_is_refused_in_one_line(
    copy: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    edit(copy, change)
    said = audit(copy, code=2)
    said_as_before(said)


def test_the_plain_reduction_keeps_nothing_for_an_audit(tmp_path: Path) -> None:
    ended = ddp("train", *WORDS, "--reduction", "plain", "--device", "cpu", "--output", tmp_path)
    assert ended.code == 2
    said_as_before(ended.errors)


def test_draws_are_even_and_the_formula_is_that_of_drawing_without_putting_back() -> None:
    segments = segments_of(ENDS)
    assert [(each.start, each.stop) for each in segments[-2:]] == [(20, 25), (25, 26)]
    assert drawn(segments, 3, 1, "record") == drawn(segments, 3, 1, "record")
    found = [each.number for seed in range(600) for each in drawn(segments, 2, seed, "record")]
    assert all(150 < found.count(number) < 250 for number in range(1, 7))
    assert passing(100, 1, 5) == pytest.approx(0.95)
    assert (needed_draws(100, 1), needed_draws(100, 10), needed_draws(100, 50)) == (95, 25, 5)
    assert (claims(100), claims(1)) == ([1, 10, 50], [1])
    assert len(drawn(segments, 9, 1, "record")) == 6


@pytest.mark.full
def test_a_bundle_is_audited_elsewhere(run: Path, tmp_path: Path) -> None:
    assert ddp("bundle", run, "-o", tmp_path / "run.zip").code == 0
    with ZipFile(tmp_path / "run.zip") as archive:
        kept = sorted(name for name in archive.namelist() if name.endswith(".pt"))
    assert kept == [f"checkpoints/step-{step:09d}.pt" for step in ENDS[:-1]]
    audit(tmp_path / "run.zip", "--segments", 1, "--seed", 2)
