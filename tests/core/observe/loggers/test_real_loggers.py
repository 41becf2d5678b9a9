"""Weights & Biases offline, with the real package: a run that is stopped and resumed is one run there."""

from __future__ import annotations

import json
import re
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

PAGE = (ROOT / "docs" / "how-to" / "log-to-tensorboard-wandb.md").read_text()
SETTINGS = ("--device", "cpu", "--log-every", "1", "--set", "max_steps=6", "--set", "seed=3")


def train(home: Path, *words: str, **settings: str) -> Ended:
    """Run a command, with results below `home` / "out"; what the package keeps for itself lands in `home`, too."""
    environment = {"HOME": str(home), "WANDB_MODE": "offline"} | settings
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


def test_the_page_has_a_command_for_each_logger() -> None:
    names: set[str] = set()
    for line in re.findall(r"\bddp train (.*)$", PAGE, re.MULTILINE):
        with group.commands["train"].make_context("train", line.split()) as context:
            names |= set(asked_in(context).log_to)
    assert names == set(get_args(LoggerName))


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
