"""What earlier versions have written is still read, and says what it said."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_lines import newest_first, read
from ddp_core import Run, load_model
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import Fence, best_checkpoint, find_checkpoints, newest_valid
from ddp_core.cli import main
from ddp_core.cli.audit import AUDIT_FORMAT
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.numerics.limits import RULES
from ddp_core.observe.heartbeat import read_heartbeats
from ddp_core.record.bundles import unpack_bundle
from ddp_core.record.data import recorded_digest
from ddp_core.record.lock import is_held
from ddp_lab.diagnose.command import FORMAT as DIAGNOSIS_FORMAT
from ddp_lab.report.reading.claims import read_findings
from ddp_lab.report.reading.runs import read_runs
from tests.formats.make import FOLDER, FORMATS, TOLD
from tests.support.commands import ROOT, ddp

FOLDERS = sorted(file.parent for file in FOLDER.glob(f"*/{TOLD}"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one version's files."""
    return Path(shutil.copytree(request.param, tmp_path / "files"))


def told(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / TOLD).read_text())
    return content


def test_every_format_of_today_has_its_files() -> None:
    there = {each for folder in FOLDERS for each in told(folder)["formats"].items()}
    missing = FORMATS.items() - there
    assert not missing, f"{dict(missing)}: `python -m tests.formats.make` makes a folder of files of this version"


def test_every_format_that_is_named_in_the_code_is_one_of_these() -> None:
    code = [file.read_text() for room in ("ddp_core", "ddp_lab", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    named = {form for text in code for form in re.findall(r'= "(ddp-[a-z]+/\d+)"', text)}
    only_written = {AUDIT_FORMAT, DIAGNOSIS_FORMAT}
    assert named == {*FORMATS.values(), *only_written}, "what is read back belongs into tests/formats/make.py"
    page = (ROOT / "docs" / "reference" / "promise.md").read_text()
    assert set(re.findall(r"\bddp-[a-z]+/\d+\b", page)) == named, "the page has every format"


def test_a_finished_run_is_read(folder: Path) -> None:
    run, says = Run(folder / "finished"), told(folder)
    assert (run.status, run.digest, run.figures["steps"]) == ("completed", says["weights_sha256"], says["steps"])
    assert [each["step"] for each in run.metrics if each["kind"] == "evaluation"] == [2, 4]
    assert {each["kind"] for each in run.metrics} == {"step", "evaluation", "digest", "checkpoint"}
    data = recorded_digest(run.path, run.record)
    assert (data.sha256, len(data.parts)) == (says["data_sha256"], 12)
    assert {found.record["weights_sha256"] for found in read_runs(folder).runs} == {says["weights_sha256"], None}


def test_its_weights_are_loaded(folder: Path) -> None:
    run, says = folder / "finished", told(folder)
    digests = {each["step"]: each["weights_sha256"] for each in Run(run).metrics if each["kind"] == "digest"}
    assert digests[says["steps"]] == says["weights_sha256"]
    assert weights_digest(load_model(run, weights="trained").state_dict()) == says["weights_sha256"]
    assert weights_digest(load_model(run, at=2, weights="trained").state_dict()) == digests[2]
    assert weights_digest(load_model(run, at="best", weights="trained").state_dict()) == digests[4]
    assert weights_digest(load_model(folder / "bundle.zip", weights="trained").state_dict()) == says["weights_sha256"]
    assert "torch==" in unpack_bundle(folder / "bundle.zip", folder / "unpacked").pins
    if says["ema_sha256"] is not None:
        assert weights_digest(load_model(run, weights="averaged").state_dict()) == says["ema_sha256"]


def test_compare_and_verify_take_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["compare", str(folder / "finished")]) == 0
    assert told(folder)["weights_sha256"][:12] in capsys.readouterr().out

    def refuse(children: Children, asked: Asked) -> None:
        raise UserError("read, and not trained here")

    monkeypatch.setattr("ddp_core.cli.verify.train_silently", refuse)
    rules = Run(folder / "finished").record["fingerprint"].get("numerics_rules", RULES)
    for what in ("finished", "bundle.zip"):
        assert main(["verify", str(folder / what)]) == ExitCode.BAD_INPUT
        said = capsys.readouterr()
        if rules == RULES:
            assert "training tiny again on single, 1 process" in said.out
            assert "read, and not trained here" in said.err
        else:
            assert f"portable numerics version {rules}, which this version no longer computes" in said.err


@pytest.mark.parametrize("command", ["verify", "eval"])
def test_a_run_of_version_1_of_the_rules_is_read_and_not_repeated(tmp_path: Path, command: str) -> None:
    run = Path(shutil.copytree(FOLDER / "0.1.0" / "finished", tmp_path / "run"))
    ended = ddp(command, run)
    assert (ended.code, ended.output) == (2, "")
    assert "portable numerics version 1, which this version no longer computes" in ended.errors
    assert len(ended.errors.splitlines()) == 1


def test_a_killed_run_on_two_ranks_goes_on_in_one_process(folder: Path) -> None:
    run, says = folder / "killed", told(folder)
    kept = newest_valid(run / "checkpoints")
    assert kept is not None
    assert (kept.step, len(kept.data)) == (says["killed_after"], says["killed_files"])
    ended = ddp("train", run / "source" / "tiny.py", "--device", "cpu", "--resume", run, "--output", folder)
    assert ended.code == 0, ended.errors
    record = Run(run).record
    assert [each["step"] for each in Run(run).metrics if each["kind"] == "resume"] == [says["killed_after"]]
    assert record["result"]["steps"] == says["steps"]
    assert record["data_sha256"] == says["data_sha256"]
    warned = "bit-identity with the steps before is not promised" in ended.output + ended.errors
    assert warned is record["fingerprint_changed"]
    if not warned:
        assert record["weights_sha256"] == says["weights_sha256"]


def test_the_small_files_beside_it_are_read(folder: Path) -> None:
    run, says = folder / "killed", told(folder)
    assert [(beat["rank"], beat["node_rank"]) for beat in read_heartbeats(run)] == [(0, 0), (1, 0)]
    assert not is_held(run)
    Fence(run, 1).check()
    assert Fence.take(run).token == 2
    best = best_checkpoint(folder / "finished" / "checkpoints")
    assert best is not None
    assert (best.step, len(find_checkpoints(best.directory))) == (says["steps"], 2)


def test_the_laboratorys_files_are_read(folder: Path) -> None:
    found, says = read_findings(folder), told(folder)
    if "drill" not in says["formats"]:
        pytest.skip("no drill was kept from this version")
    assert not found.unreadable
    (drill,), (claim,) = found.drills, found.claims
    assert (drill.digest, drill.identical, drill.exit_code) == (says["weights_sha256"], True, 0)
    assert [fault.outcome for fault in drill.faults] == ["recovered"]
    assert claim.id == "C01"
    assert [line["outcome"] for line in newest_first(read(folder / "gpu_check.jsonl"))[0].values()] == ["passed"]
