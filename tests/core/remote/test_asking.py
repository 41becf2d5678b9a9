"""Runs at a store that S3's own client talks to, by processes of their own, which are killed, refused or kept waiting.

Tests cli/addressed.py and cli/named.py, too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_core import Run, load_model
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import find_checkpoints, verify
from tests.support.commands import ROOT, Ended, command, trained, wait_until
from tests.support.stores import Store, a_run, a_store, save

pytestmark = [pytest.mark.extras("s3fs", "moto", "flask"), pytest.mark.timeout(300)]
RUNS = "s3://bucket/runs"
IN_BUCKET = "runs/digits/single-cpu-1"
LARGE = 12 * 2**20
"""So many numbers are 48 MB, which the client sends in pieces."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with a_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(server: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store, empty; the processes that a test starts talk to it."""
    here = {"XDG_CACHE_HOME": tmp_path / "cache", "PYTHONPATH": ROOT}
    for name, value in (server.environment | here).items():
        monkeypatch.setenv(name, str(value))
    yield server
    server.seconds_each, server.fails, server.refuses = 0.0, False, False
    remote("empty", RUNS)
    server.asked.clear()


def remote(*words: object) -> Ended:
    if words[0] == "empty":
        code = "import s3fs; s3fs.S3FileSystem().rm('bucket/runs', recursive=True)"
        return command(program=("-c", f"import contextlib\nwith contextlib.suppress(FileNotFoundError): {code}"))
    return command(*map(str, words), program=("-m", "ddp_core.remote"))


def copier(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "ddp_core.remote", "copy", str(folder), RUNS, "--follow"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def brought() -> list[int]:
    """The steps of the checkpoints that a reader gets, each of which is whole."""
    ended = remote("bring", f"{RUNS}/digits/single-cpu-1")
    assert ended.code == 0, ended.errors
    found = find_checkpoints(Path(ended.output.strip()) / "checkpoints")
    for checkpoint in found:
        verify(checkpoint)
    return [checkpoint.step for checkpoint in found]


def test_large_files_come_back_as_they_were(store: Store, tmp_path: Path) -> None:
    save(a_run(tmp_path, 1), 2, LARGE)
    ended = remote("copy", tmp_path, RUNS)
    assert (ended.code, ended.errors.startswith(f"ddp: {RUNS}/digits/single-cpu-1 has all of the run (")) == (0, True)
    assert any("partNumber=" in line for line in store.asked)
    assert brought() == [2, 1]


def test_a_killed_copier_leaves_whole_checkpoints_and_the_next_goes_on(store: Store, tmp_path: Path) -> None:
    run = a_run(tmp_path, 1)
    assert remote("copy", tmp_path, RUNS).code == 0
    save(run, 2, LARGE)
    store.seconds_each = 0.5
    store.asked.clear()
    with copier(tmp_path) as killed:
        wait_until(lambda: any("partNumber=1" in line for line in store.asked), 60, "the first piece")
        killed.send_signal(signal.SIGTERM)  # which is for the training
        killed.kill()
    store.seconds_each = 0.0
    assert brought() == [1]
    assert remote("copy", tmp_path, RUNS).code == 0
    assert brought() == [2, 1]


def test_a_store_that_fails_for_a_while_gets_everything_later(store: Store, tmp_path: Path) -> None:
    run = a_run(tmp_path, 1)
    with copier(tmp_path) as going_on:
        wait_until(lambda: store.has(f"{IN_BUCKET}/run.json"), 60, "the first pass")
        store.fails = True
        save(run, 2)
        wait_until(lambda: len(store.asked) > 12, 60, "a request that fails")
        store.fails = False
        assert going_on.stdin is not None
        going_on.stdin.close()
        assert going_on.stderr is not None
        said = going_on.stderr.read()
        assert going_on.wait(120) == ExitCode.DONE, said
    assert brought() == [2, 1]


def test_it_is_copied_where_nobody_reads_what_is_said(store: Store, tmp_path: Path) -> None:
    a_run(tmp_path, 1)
    with copier(tmp_path) as unheard:
        assert unheard.stdin is not None
        assert unheard.stderr is not None
        unheard.stderr.close()
        unheard.stdin.close()
        assert unheard.wait(60) == ExitCode.DONE
    assert brought() == [1]


def test_a_slow_store_is_waited_for_and_a_reader_meanwhile_has_the_checkpoint_before(
    store: Store, tmp_path: Path
) -> None:
    run = a_run(tmp_path, 1)
    assert remote("copy", tmp_path, RUNS).code == 0
    save(run, 2, LARGE)
    store.seconds_each = 0.3
    with copier(tmp_path) as slow:
        assert slow.stdin is not None
        slow.stdin.close()
        store.asked.clear()
        wait_until(lambda: any("partNumber=" in line for line in store.asked), 60, "the first piece")
        is_meanwhile = not store.has(f"{IN_BUCKET}/checkpoints/step-000000002.json")
        assert brought() in ([1], [2, 1])
        assert slow.wait(120) == ExitCode.DONE
    assert is_meanwhile
    assert brought() == [2, 1]


@pytest.mark.parametrize("words", [("check",), ("bring",)], ids=" ".join)
def test_wrong_credentials_are_one_line_without_the_secret(store: Store, words: tuple[str, ...]) -> None:
    store.refuses = True
    ended = remote(*words, RUNS)
    assert ended.code == ExitCode.RESOURCES
    (line,) = ended.errors.splitlines()
    assert line.startswith(f"ddp: error: {RUNS}: PermissionError: ")
    assert "give this machine credentials" in line
    assert "a-secret-word" not in line


def train(machine: Path, output: object, *words: object) -> Ended:
    """Train on a machine with this folder for all runs."""
    full = ["train", "toy_mlp", "--device", "cpu", "--set", "epochs=20", "--output", output, *words]
    return command(*map(str, full), env={"DDP_REHEARSAL": "off", "DDP_OUTPUT": str(machine)})


def test_a_run_is_stopped_on_one_machine_and_continued_on_a_fresh_one(store: Store, tmp_path: Path) -> None:
    layout = ("--layout", "ddp", "--nproc-per-node", 2, "--recovery", "restart", "--checkpoint-every", 1)
    ended = train(tmp_path / "first", RUNS, *layout, "--fault", "pace@1", "--fault", "stop@3")
    assert ended.code == ExitCode.STOPPED, ended.errors
    assert f"--output {RUNS}" in ended.errors
    assert ended.errors.splitlines()[-1].startswith(f"ddp: {RUNS}/toy_mlp/ddp-1x2-cpu-")
    step = find_checkpoints(trained(tmp_path / "first")[0].checkpoints)[0].step
    ended = train(tmp_path / "fresh", RUNS, "--resume", "auto")
    assert ended.code == 0, ended.errors
    assert f"resumed at step {step}" in ended.output
    assert train(tmp_path / "whole", tmp_path / "whole").code == 0
    directory, record = trained(tmp_path / "fresh")
    assert record["weights_sha256"] == trained(tmp_path / "whole")[1]["weights_sha256"]
    address = f"{RUNS}/toy_mlp/{directory.path.name}"
    for words in (
        ["verify", address],
        ["compare", RUNS],
        ["export", address, "--to", "torch", "--out", tmp_path / "it"],
    ):
        ended = command(*map(str, words))
        assert ended.code == 0, ended.errors
    assert Run(address).digest == record["weights_sha256"]
    assert weights_digest(load_model(address).state_dict()) == record["weights_sha256"]
    assert "a-secret-word" not in (directory.path / "run.json").read_text()
    assert not store.has(f"runs/toy_mlp/{directory.path.name}/checkpoints/step-{step - 1:09d}.json")


def test_a_killed_training_loses_nothing_that_was_saved(store: Store, tmp_path: Path) -> None:
    ended = train(tmp_path, RUNS, "--checkpoint-every", 1, "--fault", "kill@3")
    assert ended.code == -signal.SIGKILL
    directory = trained(tmp_path)[0]
    step = find_checkpoints(directory.checkpoints)[0].step
    name = f"runs/toy_mlp/{directory.path.name}/checkpoints/step-{step:09d}.json"
    wait_until(lambda: store.has(name), 60, "the checkpoint")


def test_a_training_for_a_store_that_refuses_it_does_not_begin(store: Store, tmp_path: Path) -> None:
    store.refuses = True
    ended = train(tmp_path, RUNS)
    assert ended.code == ExitCode.RESOURCES
    assert ended.errors.startswith(f"ddp: error: {RUNS}/toy_mlp: PermissionError: ")
    assert len(ended.errors.splitlines()) == 1, ended.errors
    assert list(tmp_path.iterdir()) == []


def test_several_nodes_are_refused(store: Store, tmp_path: Path) -> None:
    ended = train(
        tmp_path, RUNS, "--layout", "ddp", "--nnodes", 2, "--rdzv-endpoint", "localhost:1", "--rdzv-id", "once"
    )
    assert (ended.code, "is for one node" in ended.errors) == (ExitCode.BAD_INPUT, True)
