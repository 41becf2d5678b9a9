"""The health check of a rendezvous: without torch, and what is none."""

from __future__ import annotations

import os
import socket

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.launch.rendezvous import check
from tests.support.commands import ROOT, command, running
from tests.support.processes import HANG
from tests.support.wording import refusing


@pytest.mark.full
def test_the_health_check_asks_the_store_itself_and_loads_no_torch() -> None:
    """A container's check runs twice a minute, also on a machine that has no processor to spare."""
    with running("rendezvous", "--port", "0", "--bind", "127.0.0.1", cwd=ROOT) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split()[4]
        said = (
            "import sys; from ddp_core.cli.entry import main\n"
            f"print(main(['rendezvous', '--check', '127.0.0.1:{port}']), 'torch' in sys.modules)"
        )
        ended = command(program=["-c", said], timeout=HANG)
        assert (ended.output.strip(), ended.errors) == ("0 False", "")


def test_a_port_where_something_else_listens_or_nothing_is_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refusing() as refused:
            check(f"127.0.0.1:{port}")
    assert refused.value.exit_code == ExitCode.PEERS_LOST
    with refusing():
        check(f"127.0.0.1:{port}")
    assert os.environ["RES_OPTIONS"] == "timeout:1 attempts:1", "a name server that is silent keeps nobody waiting"
