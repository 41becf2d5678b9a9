"""Whole commands: that what was asked for reaches the run and its record, and what each command says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from ddp_core.numerics.limits import RULES
from tests.support.commands import ROOT, ddp, forked, train, trained, wait_until
from tests.support.processes import HANG, free_port


def test_settings_reach_the_run_and_its_record(tmp_path: Path) -> None:
    words = [
        "--set",
        "optimizer.lr=0.125",
        "--set",
        "epochs=3",
        "--set",
        "model.sizes=[10, 7, 1]",
        "--set",
        "model.name=mlp",
    ]
    record = train(tmp_path, "toy_mlp", *words, "--keep-last", "1", "--log-every", "2")
    assert record["experiment"]["optimizer"]["lr"] == 0.125
    assert record["experiment"]["epochs"] == 3
    assert record["experiment"]["model"] == {"name": "mlp", "options": {"sizes": [10, 7, 1], "dropout": 0.0}}
    assert (record["options"]["keep_last"], record["options"]["log_every"]) == (1, 2)
    assert record["result"]["steps"] == 6
    assert record["result"]["parameters"] == 7 * 11 + 8
    assert "--set optimizer.lr=0.125" in record["command"]
    directory, _ = trained(tmp_path)
    assert (directory.path / "source" / "toy_mlp.py").read_text() == (ROOT / "experiments" / "toy_mlp.py").read_text()


def test_the_record_holds_what_a_reader_needs(tmp_path: Path) -> None:
    record = train(tmp_path, "counter_buffer", "--set", "epochs=2")
    needed = {
        "format",
        "experiment",
        "layout",
        "options",
        "status",
        "exit_code",
        "weights_sha256",
        "result",
        "environment",
    }
    assert needed <= record.keys()
    assert {"train_loss", "samples_per_second", "seconds"} <= record["result"].keys()
    assert len(record["weights_sha256"]) == len(record["data_sha256"]) == 64
    assert {"python", "cpu", "packages", "code"} <= record["environment"].keys()
    assert record["fingerprint"]["numerics_rules"] == RULES
    assert record["started_at"] <= record["finished_at"]


def test_the_digest_in_the_record_is_that_of_the_saved_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from ddp_core.base.digests import weights_digest

    record = train(tmp_path, "counter_buffer", "--set", "epochs=2")
    directory, _ = trained(tmp_path)
    weights = load_file(directory.path / "model.safetensors")
    assert weights["cnt"] == 4
    assert weights_digest(weights) == record["weights_sha256"]


def test_a_file_of_ones_own_needs_no_registration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Mine?"""\nfrom torch import nn\nfrom ddp_core.config.experiment import *\n'
        "def net(width: int = 3):\n    return nn.Sequential(nn.Linear(10, width), nn.Linear(width, 1))\n"
        "experiment = Experiment(name='mine', model=Component(name='net'), data=Component(name='toy_data'),\n"
        "                        loss='mean_squared_error', global_batch_size=16, micro_batch=4)\n"
    )
    record = train(tmp_path / "out", tmp_path / "mine.py", "--set", "model.width=4")
    assert record["experiment"]["model"]["options"] == {"width": 4}
    assert record["question"] == "Mine?"
    assert record["result"]["parameters"] == 49


def test_compare_sets_runs_side_by_side(tmp_path: Path) -> None:
    train(tmp_path / "a", "toy_mlp")
    train(tmp_path / "b", "toy_mlp", "--layout", "dp", "--nproc-per-node", "2")
    ended = ddp("compare", tmp_path)
    assert ended.code == 0
    assert "single-cpu" in ended.output
    assert "dp-2-cpu (threads)" in ended.output
    assert "identical" in ended.output


@pytest.mark.slow
def test_verify_repeats_a_run_on_another_layout(tmp_path: Path) -> None:
    train(tmp_path, "toy_mlp", "--set", "seed=5")
    directory, _ = trained(tmp_path)
    ended = ddp("verify", directory.path, "--layout", "dp", "--nproc-per-node", "3", "--json")
    assert ended.code == 0, ended.errors + ended.output
    found = json.loads(ended.output)
    assert (found["run"], found["identical"], found["verdict"]) == (str(directory.path), True, "identical")
    assert any("dp-3-cpu" in line for line in found["lines"])


@pytest.mark.slow
def test_a_rendezvous_answers_and_a_second_one_on_its_port_is_refused() -> None:
    port = free_port()
    assert ddp("rendezvous", "--check", f"127.0.0.1:{port}").code == 6
    with forked("rendezvous", "--port", port) as server:
        says = f"rendezvous: listening on port {port} of every address of this machine\n"
        wait_until(lambda: server.said()[0] == says, HANG, "it listens")
        assert ddp("rendezvous", "--check", f"127.0.0.1:{port}").code == 0
        second = ddp("rendezvous", "--port", port)
        assert second.code == 4
        assert f"port {port} is in use" in second.errors
        os.kill(server.pid, signal.SIGTERM)
        assert server.end().code == 0
    assert ddp("rendezvous", "--check", "nowhere").code == 2


def test_a_rendezvous_listens_at_one_address_alone() -> None:
    with forked("rendezvous", "--port", 0, "--bind", "localhost") as server:
        wait_until(lambda: server.said()[0].endswith("\n"), HANG, "it listens")
        # The store is also a client of its own.
        connections = psutil.Process(server.pid).net_connections("tcp")
        (found,) = (each for each in connections if each.status == psutil.CONN_LISTEN)
        assert server.said()[0] == f"rendezvous: listening on port {found.laddr.port} of {found.laddr.ip}\n"
        assert found.laddr.ip in ("127.0.0.1", "::1")


@pytest.mark.parametrize(("name", "said"), [("192.0.2.77", "has the address 192.0.2.77"), ("nowhere.invalid", "name")])
def test_a_rendezvous_elsewhere_is_bad_input(name: str, said: str) -> None:
    ended = ddp("rendezvous", "--bind", name)
    assert (ended.code, said in ended.errors) == (2, True), ended.errors
    assert "Traceback" not in ended.errors
