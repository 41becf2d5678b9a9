"""`--config FILE`: settings and options from a file, below what the command line says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_core.cli import main
from ddp_core.cli.config import read_config
from ddp_core.config.options import Asked, NodeRange
from tests.core.cli.asking import said, understood
from tests.core.cli.test_options import VALUES, nothing_in_the_environment
from tests.support.commands import ddp, trained

__all__ = ["nothing_in_the_environment"]

TOML = """
epochs = 3
optimizer.lr = 0.2
model.sizes = [10, 7, 1]

[schedule]
name = "cosine"

[train]
experiment = "toy_mlp"
layout = "ddp"
nproc_per_node = 2
nnodes = "2:4"
synchronous-save = true
ledger = true
fault = ["kill@60:1"]
"""
YAML = """
epochs: 3
optimizer: {lr: 0.2}
model.sizes: [10, 7, 1]
schedule: {name: cosine}
train: {experiment: toy_mlp, layout: ddp, nproc-per-node: 2, nnodes: "2:4", synchronous-save: true, ledger: true,
        fault: kill@60:1}
"""
SETTINGS = ("epochs=3", "optimizer.lr=0.2", "model.sizes=[10, 7, 1]", "schedule.name=cosine")


def written(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.json", None)], ids=["TOML", "YAML", "JSON"]
)
def test_a_file_says_what_the_command_line_could(tmp_path: Path, name: str, text: str | None) -> None:
    yaml = pytest.importorskip("yaml")
    asked = understood("--config", written(tmp_path, text or json.dumps(yaml.safe_load(YAML)), name))
    assert asked == Asked(
        experiment="toy_mlp",
        settings=SETTINGS,
        layout="ddp",
        nproc_per_node=2,
        nnodes=NodeRange(2, 4),
        asynchronous_save=False,
        ledger=True,
        faults=("kill@60:1",),
    )
    assert understood(*asked.to_words()) == asked, "so its words need the file no more"


def test_every_option_can_stand_in_the_file(tmp_path: Path) -> None:
    hidden = ("record", "only_steps", "miniature", "clock_ahead", "noted_in", "settings")
    everything = Asked(**{name: value for name, value in VALUES.items() if name not in hidden})
    words = iter(everything.to_words()[1:])
    table: dict[str, Any] = {}
    for word in words:
        if word in ("--accept-changed-code", "--synchronous-save", "--ledger", "--cuda-graph"):
            table[word[2:]] = True
        elif word in ("--fault", "--log-to"):
            table.setdefault(word[2:], []).append(next(words))
        else:
            table[word[2:]] = next(words)
    asked = understood("mine.py", "--config", written(tmp_path, json.dumps({"train": table}), "all.json"))
    assert asked == everything


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, TOML)
    asked = understood("digits", "--set", "epochs=5", "--config", file, "--layout", "dp", "--set", "seed=1")
    assert (asked.experiment, asked.layout, asked.nproc_per_node) == ("digits", "dp", 2)
    assert asked.settings == (*SETTINGS, "epochs=5", "seed=1")


def test_what_is_not_in_the_file_does_not_count_as_given(tmp_path: Path) -> None:
    assert understood("digits", "--config", written(tmp_path, "")).model_fields_set == {"experiment", "settings"}


@pytest.mark.slow
def test_the_run_needs_the_file_no_more(tmp_path: Path) -> None:
    file = written(tmp_path, "epochs = 1\nmodel.name = 'mlp'\nmodel.sizes = [10, 7, 1]\n[train]\nlog_every = 1\n")
    words = ["toy_mlp", "--config", file, "--set", "epochs=2", "--output", str(tmp_path), "--device", "cpu"]
    assert ddp("train", *words).code == 0
    _, record = trained(tmp_path)
    assert (record["result"]["parameters"], record["result"]["steps"], record["options"]["log_every"]) == (85, 4, 1)
    assert "mine.toml" not in record["command"]
    for setting in ("--set epochs=1", "'model.sizes=[10, 7, 1]'", "--set epochs=2", "--log-every 1"):
        assert setting in record["command"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lr = 0.1", ["there is no setting lr", "did you mean optimizer.lr?"]),
        ("optimizer.learnin = 0.1", ["optimizer.learnin", "did you mean optimizer.lr?"]),
        ("optimizer.momentun = 0.1", ["did you mean optimizer.momentum?"]),
        ("[trian]\nlayout = 'ddp'", ["there is no setting trian", "did you mean train?"]),
        ("[train]\nnproc = 2", ["[train] nproc", "did you mean nproc-per-node?"]),
        ("[train]\nset = ['epochs=3']", ["[train] set", "no such option"]),
        ("[train]\nlayout = 'dpp'", ["--layout", "dpp", "'single', 'dp', 'ddp'"]),
        ("[train]\nnnodes = '4:2'", ["--nnodes", "4:2", "smaller"]),
        ("[train]\nledger = 'yes'", ["[train] ledger", "true or false"]),
        ("train = 3", ["train is a table"]),
        ("epochs = 'many'", ["epochs", "integer"]),
        ("global_batch_size = 18", ["18", "16 or 20"]),
        ("model.widht = 3", ["model.widht", "no such setting"]),
        ("model = 'mlp'", ["model", "did you mean model.name?"]),
        ("seed = 1979-05-27", ["seed = 1979-05-27", "a number, a text"]),
        ("epochs = 3\nseed = = 2", ["cannot be read", "line 2"]),
    ],
)
def test_an_error_names_the_file(
    tmp_path: Path, text: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, "train", "toy_mlp", "--config", written(tmp_path, text))
    assert line.startswith(f"ddp: error: {tmp_path / 'mine.toml'}"), line
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(("name", "why"), [("mine.ini", ".toml, .yaml or .json"), ("nowhere.toml", "No such file")])
def test_a_file_of_no_use_is_refused(tmp_path: Path, name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.ini").touch()
    assert why in said(capsys, "train", "toy_mlp", "--config", str(tmp_path / name))


def test_a_list_is_no_config_and_neither_is_broken_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    assert "names with values" in said(capsys, "train", "--config", written(tmp_path, "- a", "a.yaml"))
    assert "cannot be read" in said(capsys, "train", "--config", written(tmp_path, "a: [", "b.yaml"))


def test_texts_stay_texts(tmp_path: Path) -> None:
    config = read_config(Path(written(tmp_path, 'model.a = "3"\nmodel.b = "none"\nmodel.c = "x y"\nclip_norm = 1e-3')))
    assert config.settings == ('model.a="3"', 'model.b="none"', "model.c=x y", "clip_norm=0.001")


@pytest.mark.slow
def test_doctor_takes_the_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "micro_batch = 8\n[train]\nexperiment = 'toy_mlp'\nlayout = 'ddp'\n")
    assert main(["doctor", "--config", file, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["experiment"] == "toy_mlp"
    assert "did you mean optimizer.lr?" in said(capsys, "doctor", "--config", written(tmp_path, "lr = 1"))
