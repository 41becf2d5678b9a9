"""Whole commands: that what was asked for reaches the run and its record, and what each command says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ROOT, ddp, forked, train, trained, wait_until
from tests.support.processes import HANG


def test_settings_reach_the_run_and_its_record(tmp_path: Path) -> None:
    words = ("--set", "optimizer.lr=0.125", "--set", "epochs=3", "--set", "model.sizes=[10, 7, 1]")
    record = train(tmp_path, "toy_mlp", *words, "--set", "model.name=mlp", "--keep-last", "1", "--log-every", "2")
    assert record["experiment"]["optimizer"]["lr"] == 0.125
    assert record["experiment"]["epochs"] == 3
    assert record["experiment"]["model"] == {"name": "mlp", "options": {"sizes": [10, 7, 1], "dropout": 0.0}}
    assert (record["options"]["keep_last"], record["options"]["log_every"]) == (1, 2)
    assert record["result"]["steps"] == 6
    assert record["result"]["parameters"] == 7 * 11 + 8
    assert "--set optimizer.lr=0.125" in record["command"]
    directory, _ = trained(tmp_path)
    assert (directory.path / "source" / "toy_mlp.py").read_text() == (ROOT / "experiments" / "toy_mlp.py").read_text()


def test_a_rendezvous_listens_at_one_address_alone_until_it_is_told_to_end() -> None:
    with forked("rendezvous", "--port", 0, "--bind", "localhost") as server:
        wait_until(lambda: server.said()[0].endswith("\n"), HANG, "it listens")
        # The store is also a client of its own.
        connections = psutil.Process(server.pid).net_connections("tcp")
        (found,) = (each for each in connections if each.status == psutil.CONN_LISTEN)
        assert server.said()[0] == f"rendezvous: listening on port {found.laddr.port} of {found.laddr.ip}\n"
        assert found.laddr.ip in ("127.0.0.1", "::1")
        second = ddp("rendezvous", "--port", found.laddr.port)
        assert second.code == 4
        assert f"port {found.laddr.port} is in use" in second.errors
        os.kill(server.pid, signal.SIGTERM)
        assert server.end().code == 0
    assert ddp("rendezvous", "--check", "nowhere").code == 2


@pytest.mark.parametrize(("name", "said"), [("192.0.2.77", "has the address 192.0.2.77"), ("nowhere.invalid", "name")])
def test_a_rendezvous_elsewhere_is_bad_input(name: str, said: str) -> None:
    ended = ddp("rendezvous", "--bind", name)
    assert (ended.code, said in ended.errors) == (2, True), ended.errors
    assert "Traceback" not in ended.errors
