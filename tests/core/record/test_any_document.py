"""Whatever a stranger has put into a run directory: never an exception but a UserError, never a wait, no harm.

The documents are those of a real run. One of them is changed at one place, in its bytes, or in the type, the size or
the depth of a value, and then given to everything that reads it. Besides, real commands meet links, and texts that
would act in a terminal.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.user_code import MODULE_PREFIX
from ddp_core.checkpoint import Fence, best_checkpoint, find_checkpoints, newest_valid, sweep
from ddp_core.checkpoint.manifest import _canonical
from ddp_core.cli import main
from ddp_core.cli.prepare import load_with_settings
from ddp_core.cli.train import expected_numerics
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked, Options
from ddp_core.distributed.children import Children
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Request
from ddp_core.observe.heartbeat import name_lost_peer, renew_heartbeat
from ddp_core.record.continuing import find_resumable, require_continuable
from ddp_core.record.data import recorded_digest
from ddp_core.record.directory import RunDirectory, find_launch
from ddp_core.record.lock import require_unlocked
from ddp_core.record.reading import Run
from ddp_core.record.weights import find_weights
from ddp_lab.report.reading.runs import read_runs
from tests.support.commands import Ended, ddp, train, trained
from tests.support.own_project import write_project
from tests.support.records import an_attempt

Read = Callable[["Place"], object]

ALL_FIELDS: dict[str, Any] = {
    "init_from": {"given": "a", "file": "/nowhere/a.pt", "sha256": "0" * 64},
    "promise_broken": {"step": 3, "what": "other bits", "attempt": 0},
    "ema_sha256": None,
}
GUARD = {"mode": "normal", "rehearsal": "the same", "witness": "none", "seconds": {"again": 0.5}}
EXTENDED = {"epochs": 1, "max_steps": None, "step": 2}
CHANGED = {"source_diff_sha256": "0" * 64, "data_changed": "changed at x"}

# As they stand in a document.
VALUES = [
    *("null", "true", "0", "-1", "1", "4", "9223372036854775808", "9" * 40, "9" * 400, "9" * 5000),
    *("0.5", "1e308", "1e400", "-1e400", "NaN", "-Infinity"),
    *('""', '"x"', '"1"', '"\\u0000"', '"\\ud800"', '"\\udcff"', '"a\\nb"', '"../../x"', '"/"', '"."'),
    *(json.dumps("x" * 300), json.dumps("x" * 70_000)),
    *("[]", "{}", "[null]", "[[]]", "[30]", '{"": null}', '{"step": {}}', '["a", "a"]'),
    *("[" * 50 + "]" * 50, "[" * 99 + "]" * 99, '{"a":' * 101 + "1" + "}" * 101, "[" * 100_000, '{"a":' * 100_000),
]
_HERE = "put it here"


@dataclass(frozen=True)
class Place:
    """An output folder with a finished run, which holds every kind of document, and a request for the same."""

    output: Path
    run: Path
    request: Request
    files: dict[Path, bytes]

    @contextlib.contextmanager
    def changed(self, document: str, content: bytes) -> Iterator[None]:
        """Everything as it was, but for the content of one document."""
        (self.output / document).write_bytes(content)
        try:
            yield
        finally:
            for path in self.output.parent.rglob("*"):
                if path.is_file() and path.read_bytes() != self.files.get(path):
                    path.unlink()
            for path, known in self.files.items():
                if not path.exists():
                    path.write_bytes(known)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("documents")
    output = folder / "out"
    train(output, "toy_mlp", "--checkpoint-every", "2", "--digest-every", "2")
    made, record = trained(output)
    first, *_ = record["attempts"]
    attempts = [first | {"guard": GUARD, "extended_from": EXTENDED}]
    of_parts = {"data": {"digest_of": "2 files", "parts": 2, "sampled": True}}
    (made.path / "data.json").write_text(json.dumps({"a.txt": "0" * 64, "b.txt": "12 bytes"}))
    made.update(**ALL_FIELDS | of_parts | {"init_from": None, "promise_broken": None}, attempts=attempts, launch_id="a")
    shutil.copy(made.checkpoints / "latest.json", made.checkpoints / "best.json")
    run = made.path.rename(output / "toy_mlp" / "run")
    other = shutil.copytree(run, output / "toy_mlp" / "other")
    others = [first, an_attempt(**CHANGED)]
    RunDirectory(other).update(**ALL_FIELDS, attempts=others, status="stopped", exit_code=75, started_at="2026")
    request = Request(load_with_settings("toy_mlp", ()), Layout(), Options(output=str(output)), "auto")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return Place(output, run, request, files)


def command(*words: str) -> Read:
    """Runs a command of `ddp`, whose words may name RUN and OUT."""

    def read(place: Place) -> None:
        names = {"RUN": str(place.run), "OUT": str(place.output)}
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = main([names.get(word, word.replace("OUT", names["OUT"])) for word in words])
        assert code not in (ExitCode.INTERNAL, 130), said.getvalue()
        assert "Traceback" not in said.getvalue()

    return read


def every_part_of_a_run(place: Place) -> None:
    run = Run(place.run)
    _ = (repr(run), run.figures, run.metrics, run.promise_broken)
    recorded_digest(place.run, run.record)


def checkpoints(place: Place) -> None:
    folder = place.run / "checkpoints"
    find_checkpoints(folder)
    best_checkpoint(folder)
    sweep(folder)
    assert newest_valid(folder) is not None, "the one before is taken"


RUN: list[Read] = [
    every_part_of_a_run,
    lambda place: find_resumable(place.request, 32),
    lambda place: require_continuable(RunDirectory(place.run), place.request, 32),
    lambda place: find_launch(place.output, place.request.loaded.experiment, "a"),
    lambda place: find_weights(str(place.run)),
    lambda place: expected_numerics(Asked(experiment="toy_mlp", device="cpu", record=str(place.run / "run.json"))),
    lambda place: read_runs(place.output),
    command("compare", "RUN"),
    command("compare", "--output", "OUT"),
    command("bundle", "RUN", "-o", "OUT/new.zip"),
    command("verify", "RUN"),
]
READERS: dict[str, list[Read]] = {
    "toy_mlp/run/run.json": RUN,
    "toy_mlp/other/run.json": RUN,
    "toy_mlp/run/data.json": [every_part_of_a_run],
    "toy_mlp/run/metrics.jsonl": [every_part_of_a_run, lambda place: read_runs(place.output)],
    "toy_mlp/run/heartbeats/rank-0.json": [
        lambda place: name_lost_peer(place.run, World(rank=1, world_size=2), "[127.0.0.1]:1"),
        lambda place: renew_heartbeat(place.run, World()),
        command("health", "--output", "OUT"),
    ],
    "toy_mlp/run/run.lock": [lambda place: require_unlocked(place.run)],
    "toy_mlp/run/fence.json": [lambda place: Fence(place.run, 1).check(), lambda place: Fence.take(place.run)],
    "toy_mlp/run/checkpoints/best.json": [checkpoints],
    "toy_mlp/run/checkpoints/latest.json": [checkpoints],
    "toy_mlp/run/checkpoints/step-000000004.json": [checkpoints, lambda place: find_resumable(place.request, 32)],
}


def inner_places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Each dict or list within the document, with each key or index."""
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from inner_places(document[key])


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    start = draw(st.integers(0, len(content)))
    stop = draw(st.integers(start, min(len(content), start + 8)))
    match draw(st.sampled_from(["cut", "zeros", "replace"])):
        case "cut":
            return content[:start]
        case "zeros":
            return bytes(len(content))
    return content[:start] + draw(st.binary(max_size=4)) + content[stop:]


@st.composite
def changed_value(draw: st.DrawFn, content: bytes) -> bytes:
    document = json.loads(content)
    places = list(inner_places(document))
    container, key = places[draw(st.integers(0, len(places) - 1))]
    other = draw(st.sampled_from(VALUES))
    match draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "whole"])):
        case "replace":
            container[key] = _HERE
        case "remove":
            del container[key]
        case "rename" if isinstance(container, dict):
            container[draw(st.text(max_size=3))] = container.pop(key)
        case _:
            document = _HERE
    if isinstance(document, dict) and "seal" in document:
        del document["seal"]
        known = json.dumps(_HERE)
        with contextlib.suppress(ValueError, RecursionError):
            whole = json.loads(json.dumps(document).replace(known, other))
            document = document | {"seal": hashlib.sha256(_canonical(whole)).hexdigest()}
    return json.dumps(document).replace(json.dumps(_HERE), other).encode()


@st.composite
def changed_line(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    lines[number] = draw(changed_value(lines[number]))
    return b"\n".join(lines) + b"\n"


def changes(document: str, content: bytes) -> st.SearchStrategy[bytes]:
    changed = changed_line if document.endswith(".jsonl") else changed_value
    return changed(content) | changed_bytes(content)


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(children: Children, asked: Asked) -> None:
        raise UserError("not trained here")

    monkeypatch.setattr("ddp_core.cli.verify.train_silently", refuse)


@pytest.mark.full
def test_no_document_ends_what_reads_it(place: Place) -> None:
    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def read_a_changed_one(data: st.DataObject) -> None:
        document = data.draw(st.sampled_from(sorted(READERS)))
        content = data.draw(changes(document, place.files[place.output / document]))
        for read in READERS[document]:
            quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
            with place.changed(document, content), quiet[0], quiet[1], contextlib.suppress(UserError):
                read(place)

    read_a_changed_one()


LIMIT = 120
"""Seconds, of which a command needs a few."""
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


def resume(made: Path, run: Path) -> Ended:
    """Continue the finished run, which is told to be longer."""
    # The folder that is the default for output cannot be written to in an image.
    places = ("--data-dir", run / "data", "--output", run.parents[1])
    words = ("--resume", run, "--set", "epochs=2", "--device", "cpu")
    return ddp("train", made.parents[2] / "project" / "mine.py", *words, *places, timeout=LIMIT)


@pytest.mark.parametrize("place", ["run.lock", "log.txt", "checkpoints", "heartbeats"])
def test_a_resume_writes_through_no_link(made: Path, run: Path, tmp_path: Path, place: str) -> None:
    elsewhere = (run / place).rename(tmp_path / "elsewhere")
    (run / place).symlink_to(elsewhere)
    before = {file: file.read_bytes() for file in [elsewhere, *elsewhere.rglob("*")] if file.is_file()}
    ended = resume(made, run)
    assert (ended.code, len(ended.errors.splitlines())) == (2, 1), ended.errors
    assert f"{place} is a link" in ended.errors
    assert {file: file.read_bytes() for file in [elsewhere, *elsewhere.rglob("*")] if file.is_file()} == before


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
