"""Which run is continued, and what stops it: other settings, other code, other initial weights; with real trainings.

Tests record/changes.py and record/data.py, too.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ddp_core.cli import main
from ddp_core.experiment.file import load_experiment
from ddp_core.record.continuing import differing
from ddp_core.record.directory import find_runs
from tests.support.commands import Ended, ddp, forked, train, trained, wait_until
from tests.support.own_project import edit, write_project
from tests.support.processes import HANG, run_processes

CPU = ("--device", "cpu")
AUTO = ("--resume", "auto")


def stopped(output: Path, file: Path, *words: str) -> str:
    """Start a run, and have it stop after its first step; returns the command with which to continue it."""
    ended = ddp("train", file, *words, *CPU, "--max-seconds", "0.001", "--output", output)
    assert ended.code == 75, ended.errors
    return named_commands(ended.errors)[0]


def named_commands(text: str) -> list[str]:
    """The `ddp` commands that a message names."""
    return re.findall(r"`ddp (.*?)`", text)


def run_named(named: str, *more: str) -> None:
    ended = ddp(*shlex.split(named), *more)
    assert ended.code == 0, ended.errors


def refused(output: Path, *words: str | Path) -> str:
    """The message with which the training is refused: exit code 3, and no traceback."""
    before = len(list(find_runs(output)))
    ended = ddp("train", *words, *CPU, "--output", output)
    assert ended.code == 3, ended.errors
    assert ended.errors.count("ddp: error: ") == 1
    assert "Traceback" not in ended.errors
    assert len(list(find_runs(output))) == before, "nothing was begun anew"
    return ended.errors


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_stopped_run_names_the_command_that_continues_it(output: Path, project: Path) -> None:
    settings = ("--set", "optimizer.lr=0.02", "--set", "epochs=3")
    named = stopped(output, project, *settings)
    assert shlex.split(named)[:8] == ["train", str(project), *settings, *AUTO]
    assert trained(output)[1]["settings"] == ["optimizer.lr=0.02", "epochs=3"]
    run_named(named, "--max-seconds", "1000")
    record = trained(output)[1]
    assert record["status"] == "completed"
    assert record["weights_sha256"] == train(output / "whole", project, *settings)["weights_sha256"]


def test_a_setting_that_came_later_than_a_run_had_its_default_there() -> None:
    experiment = load_experiment("toy_mlp").experiment
    recorded = {name: value for name, value in experiment.to_json().items() if name != "memory_format"}
    assert differing({"experiment": recorded}, experiment) == {}
    changed = experiment.with_settings(["memory_format=channels_last"])
    assert differing({"experiment": recorded}, changed) == {"memory_format": ("contiguous", "channels_last")}


def test_auto_does_not_pass_over_a_run_with_other_settings(output: Path, project: Path) -> None:
    stopped(output, project, "--set", "optimizer.lr=0.02", "--set", "model.width=6", "--set", "seed=1")
    words = (project, "--set", "optimizer.lr=0.5", "--set", "seed=1", *AUTO)
    said = refused(output, *words)
    assert "model.width 6 there, 5 here; optimizer.lr 0.02 there, 0.5 here" in said
    go_on, anew = named_commands(said)
    assert "--resume never" in anew
    run_named(go_on)
    directory, record = trained(output)
    assert record["status"] == "completed"
    assert str(directory.path) in go_on
    assert (record["experiment"]["optimizer"]["lr"], record["experiment"]["seed"]) == (0.02, 1)
    assert len(record["attempts"]) == 2


def test_auto_begins_anew_where_nothing_is_lost(output: Path, project: Path) -> None:
    failing = (*CPU, "--fault", "nan@3", "--checkpoint-every", "1", "--output", output)
    assert ddp("train", project, *failing).code == 5, "it would only fail again"
    assert ddp("train", project, *CPU, "--fault", "kill@1", "--checkpoint-every", "9", "--output", output).code == -9
    ended = ddp("train", project, "--set", "optimizer.lr=0.02", *AUTO, *CPU, "--output", output)
    assert ended.code == 0, ended.errors
    assert len(list(find_runs(output))) == 3


def test_changed_code_is_shown_and_needs_a_word(output: Path, project: Path) -> None:
    stopped(output, project)
    edit(project.parent / "nets" / "big.py", "nn.Sigmoid()", "nn.Tanh()")
    said = refused(output, project, *AUTO)
    assert "(nets/big.py)" in said
    assert "\n-    return nn.Sequential(nn.Linear(10, width), nn.Sigmoid(), nn.Linear(width, 1))\n" in said
    assert "\n+    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 1))\n" in said
    (named,) = named_commands(said)
    assert "--accept-changed-code" in named
    run_named(named)
    directory, record = trained(output)
    assert record["source"]["folder"] == "source-2"
    first, second = record["attempts"]
    assert (first["source"], second["source"]) == ("source", "source-2")
    assert "source_diff_sha256" not in first
    assert len(second["source_diff_sha256"]) == 64
    texts = [(directory.path / folder / "nets" / "big.py").read_text() for folder in ("source", "source-2")]
    assert ["Tanh" in text for text in texts] == [False, True]
    assert "goes on with changed code (nets/big.py)" in directory.log.read_text()
    ended = ddp("verify", directory.path)
    assert ended.code == 2
    assert "attempt 2 went on with other code" in ended.errors


@pytest.mark.slow
def test_a_file_edited_while_a_launch_trains_ends_the_launch_at_its_restart(output: Path, project: Path) -> None:
    layout = ("--layout", "ddp", "--nproc-per-node", "2", "--recovery", "restart", "--fault", "kill@1:1")
    # The samples wait until the file was edited, so that it is edited after the run has kept it.
    edited = output.parent / "edited"
    words = ("train", project, *CPU, "--set", "data.digest=given", *layout, "--output", output)
    with forked(*words, env={"WAIT_FOR": str(edited)}) as launch:
        wait_until(lambda: len(list(output.glob("*/*/run.json"))) == 1, HANG, "the run has begun")
        edit(project.parent / "beside.py", ".sum()", ".sum() * 1")
        edited.touch()
        ended = launch.end()
    assert ended.code == 3, ended.errors
    assert ended.errors.count("starting the workers again") == 1, "and not another time"
    (said,) = [line for line in ended.errors.splitlines() if line.startswith("ddp: error: ")]
    assert "beside.py changed while this launch trained" in said
    assert "--accept-changed-code" in said
    assert ended.errors.endswith(said + "\n"), "one line"
    assert len(trained(output)[1]["attempts"]) == 1
    edit(project.parent / "beside.py", ".sum() * 1", ".sum()")
    record = train(output, project, "--set", "data.digest=given", *AUTO)
    assert (record["status"], len(record["attempts"])) == ("completed", 2)


def test_a_module_that_is_imported_too_late_is_named(output: Path, project: Path) -> None:
    (project.parent / "late.py").write_text("FACTOR = 1\n")
    edit(project.parent / "beside.py", "    return (", "    from late import FACTOR\n    return FACTOR * (")
    ended = ddp("train", project, *CPU, "--output", output)
    assert ended.code == 0, ended.errors
    assert "warning: module late was imported while training" in ended.errors


def _train_own(rank: int, world_size: int, words: list[list[str]]) -> tuple[int, str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(f"{words[rank][-1]}-{rank}", "w") as said:  # noqa: PTH123
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    return main(["train", *words[rank], "--layout", "ddp", *CPU]), Path(said.name).read_text()


@pytest.mark.parametrize("what", ["code", "data"])
def test_ranks_with_other_code_or_data_do_not_train_together(
    tmp_path: Path, output: Path, project: Path, what: str
) -> None:
    elsewhere, data = write_project(tmp_path / "elsewhere"), tmp_path / "data"
    data.mkdir()
    if what == "code":
        edit(elsewhere.parent / "beside.py", ".sum()", ".mean()")
    else:
        (data / "shift").write_text("0.5")
    words = [
        [str(file), "--data-dir", str(folder), "--output", str(output)]
        for file, folder in ((project, tmp_path / "nothing"), (elsewhere, data))
    ]
    ended = run_processes(_train_own, 2, words)
    assert [code for code, _ in ended] == [2, 2]
    expected = {
        "code": "ranks 1 have another beside.py than rank 0",
        "data": "ranks 1 have other data than rank 0 (changed at sample 3 (training))",
    }
    assert expected[what] in ended[0][1]
    assert "Traceback" not in "".join(said for _, said in ended)


def extend(output: Path, file: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Train four steps, then on to eight; returns the record and what the second training said."""
    train(output, file, *words)
    ended = ddp("train", file, *words, "--set", "epochs=4", *AUTO, *CPU, "--output", output)
    assert ended.code == 0, ended.errors
    assert "extends the finished run from 4 to 8 steps" in ended.output
    assert "resumed at step 4" in ended.output
    return trained(output)[1], ended.output


def test_an_extended_run_ends_as_one_long_run(output: Path, project: Path) -> None:
    record, said = extend(output, project)
    whole = train(output / "whole", project, "--set", "epochs=4")
    assert "shorter" not in said
    for name in ("weights_sha256", "optimizer_sha256", "experiment_sha256"):
        assert record[name] == whole[name]
    assert record["result"]["steps"] == 8
    assert record["attempts"][1]["extended_from"] == {"epochs": 2, "max_steps": None, "step": 4}


@pytest.mark.slow
def test_verify_repeats_an_extension_and_the_weights_that_a_run_began_with(output: Path, project: Path) -> None:
    train(output / "first", project)
    first, _ = trained(output / "first")
    _, said = extend(output / "second", project, "--set", "schedule.name=cosine", "--init-from", str(first.path))
    assert "schedule cosine depends on the length of the run" in said

    def verified() -> Ended:
        return ddp("verify", trained(output / "second")[0].path, module="tests.support.quick")

    ended = verified()
    assert (ended.code, ended.output.splitlines()[-1]) == (0, "identical"), ended.output + ended.errors
    weights = first.path / "model.safetensors"
    weights.write_bytes((trained(output / "second")[0].path / "model.safetensors").read_bytes())
    changed = verified()
    assert (changed.code, "model.safetensors holds other weights" in changed.output) == (1, True)
    weights.unlink()
    gone = verified()
    assert (gone.code, "model.safetensors is gone" in gone.output) == (1, True)


def test_a_finished_run_is_extended_by_length_alone_and_from_its_end(output: Path, project: Path) -> None:
    train(output, project)
    directory, _ = trained(output)
    assert "epochs 2 there, 1 here" in refused(output, project, "--set", "epochs=1", "--resume", directory.path)
    other = ("--set", "epochs=4", "--set", "seed=3", "--resume", directory.path)
    assert "seed 0 there, 3 here" in refused(output, project, *other)
    for manifest in directory.checkpoints.glob("step-000000004.*"):
        manifest.unlink()
    said = refused(output, project, "--set", "epochs=4", "--resume", directory.path)
    assert "no checkpoint of its last step 4" in said
    assert len(trained(output)[1]["attempts"]) == 1


def test_a_run_begins_with_given_weights(output: Path, project: Path) -> None:
    first = train(output / "first", project)
    path = trained(output / "first")[0].path
    words = ("--init-from", path)
    record = train(output / "second", project, *words, "--set", "optimizer.lr=1e-30")
    told = {"given": str(path), "file": str(path / "model.safetensors"), "sha256": first["weights_sha256"]}
    assert record["init_from"] == told
    assert record["weights_sha256"] == first["weights_sha256"], "no step changes them"
