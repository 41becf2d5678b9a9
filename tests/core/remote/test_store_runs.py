"""`ddp train --output ADDRESS` and commands that read from there, with a folder as the store."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import ddp_core
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from ddp_core.base.files import is_address, take_lock
from ddp_core.remote import local
from ddp_core.remote.sending import LOCK
from ddp_core.remote.store import Store
from tests.support.commands import ddp, forked, train, wait_until

TINY = ("train", "toy_mlp", "--device", "cpu", "--rehearsal", "off")


@pytest.mark.parametrize(
    "address",
    ["s3://key:secret@bucket/runs", "s3://bucket/runs?key=1", "s3://", "s3://bucket/../other", "no scheme://bucket"],
)
def test_an_address_is_refused_that_could_be_recorded_or_lead_elsewhere(address: str) -> None:
    with pytest.raises(UserError, match="address") as raised:
        local(address)
    assert "secret" not in str(raised.value)


def test_each_address_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert local("s3://bucket/runs/") == tmp_path / "samebits" / "s3" / "bucket" / "runs"
    assert local("outputs") == Path("outputs")
    assert not is_address("outputs/s3:/bucket")


def test_a_store_that_fsspec_does_not_know_is_named() -> None:
    with pytest.raises(UserError, match="nonsense"):
        Store("nonsense://bucket")


FORKS = """
import os, time
from pathlib import Path
from ddp_core import Callback, Component, Experiment

class Forks(Callback):
    def on_epoch(self, moment):
        child = os.fork() if not (Path(__file__).parent / "child").exists() else -1
        if child == 0:
            time.sleep(600)
            os._exit(0)
        if child > 0:
            (Path(__file__).parent / "child").write_text(str(child))

callbacks = [Forks()]
experiment = Experiment(
    name="forks", model=Component(name="two_layer"), data=Component(name="toy_data", options={"size": 32}),
    loss="mean_squared_error", global_batch_size=16, micro_batch=4, epochs=9, numerics="portable",
)
"""
"""A training with a child process that outlives it and holds copies of its open files."""


def machine(folder: Path, name: str) -> dict[str, str]:
    """The environment of a machine with local folders of its own."""
    return {"XDG_CACHE_HOME": str(folder / name)}


def is_free(run: Path) -> bool:
    """Whether nobody copies the run any more."""
    try:
        with (run / LOCK).open() as file:
            return take_lock(file.fileno(), patience=0)
    except FileNotFoundError:  # it has not begun yet
        return False


def the_run(address: str) -> str:
    (record,) = [name for name in Store(address).names() if name.endswith("/run.json")]
    return f"{address}/{record.removesuffix('/run.json')}"


@pytest.mark.full
def test_a_killed_run_goes_on_on_another_machine_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{tmp_path}/bucket"
    words = [*TINY, "--set", "epochs=4", "--checkpoint-every", "2", "--synchronous-save", "--output", address]
    with forked(*words, "--fault", "kill@5", env=machine(tmp_path, "a")) as killed:
        assert killed.end().code == -9
        (local_run,) = (path.parent for path in (tmp_path / "a").rglob("run.json"))
        # The process that copies has outlived the training, and ends once all is there.
        wait_until(lambda: is_free(local_run), 60, "all is copied")
    run = the_run(address)
    assert "checkpoints/step-000000004.json" in Store(run).names()
    ended = ddp(*words, "--resume", "auto", "--layout", "ddp", "--nproc-per-node", "2", env=machine(tmp_path, "b"))
    assert ended.code == 0, ended.errors
    usual = train(tmp_path / "usual", "toy_mlp", "--set", "epochs=4", "--rehearsal", "off")
    compared = ddp("compare", "--json", address, env=machine(tmp_path, "c"))
    assert usual["weights_sha256"] in compared.output, compared.errors
    verified = ddp("verify", run, env=machine(tmp_path, "e"))
    assert verified.code == 0, verified.errors
    exported = ddp("export", run, "--to", "torch", "--out", tmp_path / "weights", env=machine(tmp_path, "e"))
    assert exported.code == 0, exported.errors
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "f"))
    assert ddp_core.Run(run).digest == usual["weights_sha256"]
    assert weights_digest(ddp_core.load_model(run).state_dict()) == usual["weights_sha256"]


def test_where_nothing_can_be_written_no_training_begins(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("a file")
    ended = ddp(*TINY, "--output", f"file://{tmp_path}/bucket/runs", env=machine(tmp_path, "a"))
    assert ended.code == 4
    assert "bucket/runs" in ended.errors
    assert len(ended.errors.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize("fault", [(), ("--fault", "stop@2")])
def test_a_run_that_cannot_be_copied_ends_with_4_and_says_where_it_is(tmp_path: Path, fault: tuple[str, ...]) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "toy_mlp").write_text("a file in the place of the runs")
    ended = ddp(*TINY, *fault, "--output", f"file://{tmp_path}/bucket", env=machine(tmp_path, "a"))
    (record,) = (tmp_path / "a").rglob("run.json")
    assert ended.code == 4
    assert f"it is in {record.parent}, and the next `ddp train` with this --output copies it first" in ended.errors
    (tmp_path / "bucket" / "toy_mlp").unlink()
    again = ddp(*TINY, "--output", f"file://{tmp_path}/bucket", env=machine(tmp_path, "a"))
    assert again.code == 0, again.errors
    assert f"toy_mlp/{record.parent.name}/run.json" in Store(f"file://{tmp_path}/bucket").names()


def test_a_run_named_by_its_address_goes_on_there(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/bucket"
    stopped = ddp(*TINY, "--fault", "stop@2", "--output", address, env=machine(tmp_path, "a"))
    assert stopped.code == 75, stopped.errors
    ended = ddp(*TINY, "--resume", the_run(address), env=machine(tmp_path, "b"))
    assert ended.code == 0, ended.errors
    assert json.loads(Store(the_run(address)).read("run.json") or b"")["status"] == "completed"


def test_the_copying_process_ends_with_a_training_whose_child_lives_on(tmp_path: Path) -> None:
    file = tmp_path / "forks.py"
    file.write_text(FORKS)
    words = ("train", file, "--device", "cpu", "--rehearsal", "off", "--output", f"file://{tmp_path}/bucket")
    with forked(*words, "--fault", "kill@3", env=machine(tmp_path, "a")) as killed:
        assert killed.end().code == -9
        (run,) = (path.parent for path in (tmp_path / "a").rglob("run.json"))
        wait_until(lambda: is_free(run), 60, "the copying process has ended")
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_several_nodes_are_refused(tmp_path: Path) -> None:
    words = ("--layout", "ddp", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", "x")
    ended = ddp(*TINY, *words, "--output", f"file://{tmp_path}/bucket", env=machine(tmp_path, "a"))
    assert ended.code == 2
    assert "one node" in ended.errors
