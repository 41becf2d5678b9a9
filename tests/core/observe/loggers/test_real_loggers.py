"""MLflow and Weights & Biases offline, with the real packages: a run that is stopped and resumed is one run there."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from ddp_core.cli.click_kinds import asked_in
from ddp_core.cli.commands import ddp as group
from ddp_core.config.options import LoggerName
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.directory import RunDirectory
from tests.support.commands import ROOT, Ended, ddp, trained

PAGES = ("log-to-tensorboard-mlflow-wandb.md", "log-to-prometheus.md")
PAGE = "\n".join((ROOT / "docs" / "how-to" / page).read_text() for page in PAGES)
SETTINGS = ("--device", "cpu", "--log-every", "1", "--set", "max_steps=6", "--set", "seed=3")


def train(home: Path, *words: str, **settings: str) -> Ended:
    """Run a command, with results below `home` / "out"; what the packages keep for themselves lands in `home`, too."""
    environment = {"HOME": str(home), "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_MODE": "offline"} | settings
    return ddp(*words, *SETTINGS, "--output", home / "out", env=environment)


def on_the_page(logger: str) -> list[str]:
    """The words of the how-to's own command for this logger, without `ddp`."""
    return re.findall(rf"^ddp (train \w+ --log-to {logger})$", PAGE, re.MULTILINE)[0].split()


def stop_and_resume(home: Path, logger: str) -> tuple[RunDirectory, dict[str, Any]]:
    """Stop a run on one process, and end it on two; return its directory and record."""
    words = on_the_page(logger)
    stopped = train(home, *words, "--max-seconds", "0.001")
    assert stopped.code == 75, stopped.errors
    ended = train(home, *words, "--resume", "auto", "--layout", "ddp", "--nproc-per-node", "2")
    assert ended.code == 0, ended.errors
    assert "warning" not in stopped.errors + ended.errors
    return trained(home / "out")


def test_the_pages_have_a_command_for_each_logger() -> None:
    names: set[str] = set()
    for line in re.findall(r"\bddp train (.*)$", PAGE, re.MULTILINE):
        with group.commands["train"].make_context("train", line.split()) as context:
            names |= set(asked_in(context).log_to)
    assert names == set(get_args(LoggerName))


@pytest.mark.extras("mlflow", "sqlalchemy", "alembic")
def test_mlflow_keeps_a_resumed_run_as_one(tmp_path: Path) -> None:
    directory, record = stop_and_resume(tmp_path, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'out' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == directory.path.name
    assert run.info.status == "FINISHED"
    assert (run.data.params["seed"], run.data.params["optimizer.name"]) == (
        "3",
        record["experiment"]["optimizer"]["name"],
    )
    assert run.data.tags["layout"] == "ddp-1x2-cpu"
    assert run.data.tags["weights_sha256"] == record["weights_sha256"]
    assert run.data.metrics["result/test_loss"] == record["result"]["test_loss"]
    assert "test_loss" in run.data.metrics
    losses = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}
    assert losses == {step["step"]: step["loss"] for step in read_metrics(directory.metrics, "step")}


@pytest.mark.extras("prometheus_client")
def test_prometheus_reads_the_last_values_of_a_resumed_run(tmp_path: Path) -> None:
    from prometheus_client.parser import text_fd_to_metric_families

    folder = tmp_path / "textfiles"
    folder.mkdir()
    words = [*on_the_page("prometheus"), "--layout", "single", "--checkpoint-every", "2"]
    place = {"DDP_PROMETHEUS_DIR": str(folder)}
    assert train(tmp_path, *words, "--max-seconds", "0.001", **place).code == 75
    assert 'ddp_run_status="stopped",experiment="digits"' in next(folder.iterdir()).read_text()
    ended = train(tmp_path, *words, "--resume", "auto", **place)
    assert ended.code == 0, ended.errors
    assert "warning" not in ended.errors
    directory, record = trained(tmp_path / "out")

    (file,) = folder.iterdir()
    assert file.name == f"ddp-digits-{directory.path.name}.prom"
    with file.open() as text:
        families = {family.name: family for family in text_fd_to_metric_families(text)}
    samples = [sample for family in families.values() for sample in family.samples]
    assert all(sample.labels["run"] == directory.path.name for sample in samples)
    assert all(sample.labels["experiment"] == "digits" for sample in samples)
    assert {name: family.type for name, family in families.items() if family.type != "gauge"} == {
        "ddp_checkpoints": "counter"
    }
    value = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    names = ("digits", directory.path.name)
    last = read_metrics(directory.metrics, "step")[-1]
    assert value["ddp_step", *names] == value["ddp_planned_steps", *names] == 6
    assert value["ddp_loss", *names] == last["loss"]
    assert value["ddp_learning_rate", *names] == last["lr"]
    assert value["ddp_data_wait_ratio", *names] == last["data_wait"]
    assert value["ddp_checkpoints_total", *names] >= 2
    figures = {sample.labels["figure"]: sample.value for sample in samples if sample.name == "ddp_result"}
    assert figures["test_loss"] == record["result"]["test_loss"]
    states = {sample.labels["ddp_run_status"]: sample.value for sample in samples if sample.name == "ddp_run_status"}
    assert states == {"running": 0, "completed": 1, "stopped": 0, "failed": 0}


@pytest.mark.extras("prometheus_client")
def test_prometheus_without_a_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for place in ({}, {"DDP_PROMETHEUS_DIR": str(tmp_path / "missing")}):
        ended = train(tmp_path, *on_the_page("prometheus"), **place)
        assert ended.code == 2
        assert "DDP_PROMETHEUS_DIR" in ended.errors
    assert not (tmp_path / "out").exists()


@pytest.mark.extras("mlflow")
def test_a_server_that_is_not_there_costs_one_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        server = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    ended = train(tmp_path, *on_the_page("mlflow"), MLFLOW_TRACKING_URI=server, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert ended.code == 0
    assert ended.errors.count("warning: mlflow is left out from here on: MlflowException") == 1
    assert trained(tmp_path / "out")[1]["status"] == "completed"


@pytest.mark.extras("wandb")
def test_wandb_keeps_a_resumed_run_under_one_id(tmp_path: Path) -> None:
    directory, record = stop_and_resume(tmp_path, "wandb")
    attempts = sorted((directory.path / "wandb").glob("offline-run-*"))
    assert [attempt.name.partition("-run-")[2].partition("-")[2] for attempt in attempts] == [directory.path.name] * 2

    kept = [list(records(next(attempt.glob("*.wandb")))) for attempt in attempts]
    assert {part.run.run_id for attempt in kept for part in attempt if part.HasField("run")} == {directory.path.name}
    assert [next(part.exit.exit_code for part in attempt if part.HasField("exit")) for attempt in kept] == [75, 0]
    settings = {item.key: json.loads(item.value_json) for item in _first(kept[1], "run").config.update}
    assert (settings["seed"], settings["layout"]) == (3, "ddp-1x2-cpu")
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in part.history.item}
        for attempt in kept
        for part in attempt
        if part.HasField("history")
    ]
    losses = {row["step"]: row["loss"] for row in history if "loss" in row}
    assert losses == {step["step"]: step["loss"] for step in read_metrics(directory.metrics, "step")}
    summary = {
        item.key or item.nested_key[0]: json.loads(item.value_json)
        for part in kept[1]
        if part.HasField("summary")
        for item in part.summary.update
    }
    assert summary["weights_sha256"] == record["weights_sha256"]
    assert summary["result/test_loss"] == record["result"]["test_loss"]


@pytest.mark.extras("wandb")
def test_without_a_login_wandb_is_refused_before_anything_starts(tmp_path: Path) -> None:
    ended = train(tmp_path, *on_the_page("wandb"), WANDB_MODE="online", WANDB_API_KEY="")
    assert ended.code == 2
    assert "ddp: error: --log-to wandb needs a login: run `wandb login`" in ended.errors
    assert not list((tmp_path / "out").glob("*/*"))


def _first(attempt: list[Any], kind: str) -> Any:
    return next(getattr(part, kind) for part in attempt if part.HasField(kind))


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(parts)
            parts = b""
