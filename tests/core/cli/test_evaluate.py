"""`ddp eval`: the figures of a checkpoint, with the bits of the run, on other layouts and other data."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddp_core import Run
from tests.support.commands import ROOT, ddp, train, trained
from tests.support.processes import run_processes

AVERAGED = ROOT / "tests" / "core" / "record" / "experiment_files" / "averaged.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("project")
    # The file may be gone: the run has kept its code.
    own = shutil.copy(AVERAGED, folder / "own.py")
    train(folder / "out", own, "--checkpoint-every", "3", "--keep-every", "3")
    own.unlink()
    return Run(trained(folder / "out")[0].path)


def test_a_document_stands_alone_where_the_data_have_no_digest(tmp_path: Path) -> None:
    """Training says in a line what it has digested then."""
    train(tmp_path, ROOT / "tests" / "distributed" / "experiment_files" / "stops.py")
    told(trained(tmp_path)[0].path)


def told(run: object, *words: object) -> dict[str, Any]:
    ended = ddp("eval", run, "--json", *words)
    assert ended.code == 0, ended.errors
    document: dict[str, Any] = json.loads(ended.output)
    return document


def _evaluate(rank: int, world_size: int, words: list[str]) -> tuple[int, str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from ddp_core.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as said:
        return main(words), said.getvalue()


@pytest.mark.full
def test_the_bits_are_those_that_the_run_recorded(run: Run) -> None:
    found = told(run.path)
    recorded = [record for record in run.metrics if record["kind"] == "evaluation"][-1]
    assert found["figures"] == {name: recorded[name] for name in found["figures"]}
    assert found["figures"].keys() == {f"{ema}test_{name}" for ema in ("", "ema_") for name in ("loss", "accuracy")}
    assert (found["step"], found["identical"], found["same_data"]) == (10, True, True)
    assert (found["weights_sha256"], found["ema_sha256"]) == (run.digest, run.record["ema_sha256"])


@pytest.mark.full
def test_ranks_evaluate_a_checkpoint_as_one_process_does(run: Run) -> None:
    words = ["eval", str(run.path), "--at", "6", "--json", "--layout", "ddp"]
    (code, text), (other, silence) = run_processes(_evaluate, 2, words)
    assert (code, other, silence) == (0, 0, "")
    found = json.loads(text)
    assert found["layout"] == "ddp-1x2-cpu"
    assert found["recorded"] is found["identical"] is None
    assert found["figures"] == told(run.path / "checkpoints" / "step-000000006.json")["figures"]


@pytest.mark.full
def test_other_data_and_settings_of_evaluation_only(run: Run) -> None:
    found = told(run.path, "--set", "evaluation.samples_per_batch=100")
    assert found["figures"]["test_accuracy"] == run.figures["test_accuracy"]
    assert (found["same_data"], found["identical"]) == (True, None)
    found = told(run.path, "--set", "data.test_share=0.1")
    assert (found["same_data"], found["identical"], found["settings"]) == (False, None, ["data.test_share=0.1"])
    refused = ddp("eval", run.path, "--set", "optimizer.lr=1")
    assert refused.code == 2
    assert "ddp eval changes data and evaluation alone" in refused.errors
    refused = ddp("eval", run.path, "--set", "data.name=digit")
    assert refused.code == 2
    assert "did you mean digits?" in refused.errors


@pytest.mark.full
def test_figures_that_the_run_has_not_made_are_an_error(run: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(run.path, tmp_path / "copy")
    metrics = copy / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"test_loss": ', '"test_loss": 1'))
    found = ddp("eval", copy)
    assert found.code == 2
    assert "different: test_loss is " in found.output
    assert f"`ddp verify {copy}` tells more" in found.errors
    metrics.write_text(metrics.read_text().replace(str(run.digest), "0" * 64))
    found = ddp("eval", copy / "checkpoints" / "step-000000010.pt")
    assert (found.code, found.output) == (3, "")
    assert "has other weights than it recorded at step 10" in found.errors
