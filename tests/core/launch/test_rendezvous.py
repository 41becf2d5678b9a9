"""The rendezvous where no name server answers: torch asks for the name of every address, and waits ten seconds."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.world import free_port
from ddp_core.launch.rendezvous import check
from tests.support.commands import ROOT, command, running
from tests.support.processes import HANG
from tests.support.wording import refusing

SILENT = "127.0.0.9"
INSIDE = """
import os, subprocess, sys
folder, *words = sys.argv[1:]
for name in ("resolv.conf", "hosts"):
    subprocess.run(["mount", "--bind", f"{folder}/{name}", f"/etc/{name}"], check=True)
os.execv(sys.executable, [sys.executable, "-m", "ddp_core", *words])
"""


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


def test_a_port_where_something_else_listens_or_nothing_is_no_rendezvous() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refusing() as refused:
            check(f"127.0.0.1:{port}")
    assert refused.value.exit_code == ExitCode.PEERS_LOST
    with refusing():
        check(f"127.0.0.1:{port}")


def own_mounts() -> bool:
    found = shutil.which("unshare")
    return found is not None and subprocess.run([found, "-m", "true"], capture_output=True).returncode == 0


def other_address() -> str | None:
    """An address of this machine whose name no file knows."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == 2]
    return next((address for address in found if not address.startswith("127.")), None)


@pytest.mark.slow
def test_it_serves_and_answers_where_no_name_server_does(tmp_path: Path) -> None:
    address, port = other_address(), free_port()
    if address is None or not own_mounts():
        pytest.skip("needs a network interface and the right to mount (root)")
    (tmp_path / "resolv.conf").write_text(f"nameserver {SILENT}\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "enter.py").write_text(
        "import os, sys\nos.execvp('unshare', ['unshare', '-m', sys.executable, *sys.argv[1:]])\n"
    )
    (tmp_path / "inside.py").write_text(INSIDE)
    program = [str(tmp_path / "enter.py"), str(tmp_path / "inside.py"), str(tmp_path)]
    with socket.socket(type=socket.SOCK_DGRAM) as silent:
        silent.bind((SILENT, 53))
        with running("rendezvous", "--port", str(port), program=program, cwd=ROOT) as server:
            assert server.stdout is not None
            assert server.stdout.readline().startswith(f"rendezvous: listening on port {port} ")
            ended = command("rendezvous", "--check", f"{address}:{port}", program=program, timeout=HANG)
            assert (ended.code, ended.errors) == (0, "")
