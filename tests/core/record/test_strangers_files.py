"""A run directory that a stranger has filled, through real commands: they end in time, and harm nothing elsewhere.

A pipe keeps a careless reader waiting for ever, and a link leads a careless writer to any file of the user.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import MODULE_PREFIX
from ddp_core.cli import main
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from tests.core.record.test_any_document import inner_places
from tests.support.commands import ddp, train, trained
from tests.support.own_project import write_project

LIMIT = 120
"""Seconds, of which a command needs a few: one that waits at a pipe would wait for ever."""
TOO_LARGE = "(larger than 8,388,608 bytes)"
FORGED = "\x1b[2K\ndigests: 5 exact runs, identical"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run of an experiment with modules of its own; tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    file = write_project(folder / "project")
    train(folder / "out", file, "--data-dir", folder / "data", "--checkpoint-every", "2")
    return trained(folder / "out")[0].path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, below an output folder."""
    return shutil.copytree(made, tmp_path / "out" / made.parent.name / made.name)


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "make", "said"),
    [
        ("run.lock", os.mkfifo, "run.lock is a pipe or a device"),
        ("metrics.jsonl", lambda place: place.symlink_to("/dev/zero"), "metrics.jsonl is a link"),
        ("source/beside.py", os.mkfifo, "beside.py cannot be read (it is a pipe or a device"),
        ("heartbeats/rank-0.json", os.mkfifo, None),
    ],
)
def test_no_command_waits_at_a_pipe_or_reads_a_device_without_end(
    made: Path, run: Path, place: str, make: Callable[[Path], None], said: str | None
) -> None:
    (run / place).unlink(missing_ok=True)
    (run / place).parent.mkdir(exist_ok=True)
    make(run / place)
    output = run.parents[1]
    for ended in (
        ddp("compare", "--no-check", "--output", output, timeout=LIMIT),
        ddp("watch", "--once", run, timeout=LIMIT),
        ddp("verify", run, timeout=LIMIT, module="tests.support.quick"),
        ddp("--output", output, "--to", output / "report", timeout=LIMIT, module="ddp_lab.report"),
    ):
        assert (ended.code == 0 or "different code" in ended.output, ended.errors) == (True, "")
    # The finished run, which is told to be longer.
    words = ("--resume", run, "--set", "epochs=2", "--device", "cpu", "--data-dir", run / "data", "--output", output)
    ended = ddp("train", made.parents[2] / "project" / "mine.py", *words, timeout=LIMIT)
    lines = ended.errors.splitlines()
    assert (ended.code, len(lines)) == ((2, 1) if said else (0, 0))
    assert said is None or said in lines[0]


def changed(run: Path, **fields: Any) -> None:
    """The run, with other fields in its record."""
    file = run / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_run_that_branches_off_from_itself_is_no_line_to_follow(run: Path) -> None:
    other = shutil.copytree(run, run.with_name("other"))
    fork = {"given": "x", "step": 2, "hyperparameters": []}
    fork |= dict.fromkeys(("checkpoint_sha256", "weights_sha256", "experiment_sha256"), "0" * 64)
    changed(run, forked_from=fork | {"run": str(other)})
    changed(other, forked_from=fork | {"run": str(run)})
    ended = ddp("verify", run, timeout=LIMIT)
    assert (ended.code, ended.output) == (2, "")
    assert ended.errors == (
        f"ddp: error: {run} branches off from itself, as its run.json and those of its parents say\n"
    )
    for words in (("compare", "--no-check", run), ("watch", "--once", run)):
        assert ddp(*words, timeout=LIMIT).code == 0


def test_a_record_of_many_attempts_is_refused_before_it_is_read(run: Path) -> None:
    attempt = {"layout": {"kind": "single", "device": "cpu", "nnodes": 1, "nproc_per_node": 1}}
    changed(run, attempts=100_000 * [attempt | {"started_at": "2026-01-01T00:00:00Z", "restart_count": 0}])
    for words in (("watch", "--once", run), ("compare", run), ("verify", run)):
        ended = ddp(*words, timeout=LIMIT)
        assert (ended.code, ended.output) == (2, "")
        assert ended.errors.endswith(f"{run} is not a run directory: it has no readable run.json {TOO_LARGE}\n")
        assert len(ended.errors.splitlines()) == 1


@pytest.mark.full
def test_no_text_of_a_record_prints_a_line_of_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each text and each name in run.json is forged, one at a time."""

    def refuse(children: Children, asked: Asked) -> None:
        raise UserError("not trained here")

    monkeypatch.setattr("ddp_core.cli.verify.train_silently", refuse)
    # `verify` imports the modules that the run has kept, which no later test of this process may find.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    whole = json.loads((run / "run.json").read_text())
    whole |= {"message": "text", "promise_broken": {"step": 1, "what": "text"}, "experiment_file": "text"}
    whole["ended_early"] = {"step": 1, "of": 2, "reason": "text"}
    whole["environment"]["packages"] = {"torch": "2.0"}
    other = shutil.copytree(run, run.with_name("other"))
    changed(other, experiment_sha256="0" * 64)  # a table of its own, so that its title says what sets it apart
    count = sum(1 for _ in inner_places(whole))
    for number in range(2 * count):
        forged = copy.deepcopy(whole)
        container, key = next(itertools.islice(inner_places(forged), number // 2, None))
        if number % 2 and isinstance(container, dict):
            container[f"{key}{FORGED}"] = container[key]
        elif isinstance(container[key], str):
            container[key] += FORGED
        else:
            continue
        (run / "run.json").write_text(json.dumps(forged))
        for words in (
            ("compare", "--no-check", str(other), str(run)),
            ("watch", "--once", str(run)),
            ("verify", str(run)),
        ):
            main(words)
            said = "\n".join(capsys.readouterr())
            assert "\x1b" not in said, (words, container, key)
            assert FORGED.split("\n")[1] not in said.splitlines(), (words, container, key)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("beside", "nets") or name.startswith(MODULE_PREFIX):
            del sys.modules[name]
