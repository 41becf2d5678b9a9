"""What `ddp train` refuses before it loads torch, and what it leaves to the run itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli.train import require_free
from ddp_core.config.options import Asked
from ddp_core.distributed.world import World, free_port
from ddp_core.record.lock import RunLock


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_several_threads_hang_in_no_process_that_a_launch_has_forked(tmp_path: Path) -> None:
    """OpenMP does, where the launcher itself has computed in several threads: building `digits` is enough."""
    words = ("train", "digits", "--device", "cpu", "--set", "max_steps=2", "--rehearsal", "on", "--output", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "ddp_core", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "rehearsed in" in ended.stdout + ended.stderr


@pytest.fixture
def held(tmp_path: Path) -> Iterator[str]:
    """A run directory that a process of this machine, this one, works in."""
    with RunLock(tmp_path):
        yield str(tmp_path)


def test_a_directory_in_use_is_refused_without_a_wait_for_its_holder(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_core.record.lock._PATIENCE_SECONDS", 1000.0)
    with pytest.raises(UserError, match="another run is using") as caught:
        require_free(Asked(experiment="toy_mlp", resume=held), World())
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_one_of_several_nodes_or_workers_may_find_its_own_launch_there(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_free(Asked(experiment="toy_mlp", resume=held, nnodes="1:2"), World())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    require_free(Asked(experiment="toy_mlp", resume=held), World())


def test_a_directory_that_is_free_or_not_named_is_no_matter_yet(tmp_path: Path) -> None:
    for resume in ("auto", "never", str(tmp_path), str(tmp_path / "nowhere")):
        require_free(Asked(experiment="toy_mlp", resume=resume), World())


def test_only_the_rank_that_serves_the_store_asks_for_its_port() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        first = World(world_size=2, nproc_per_node=2, store_host="127.0.0.1", store_port=port)
        asked = Asked(experiment="toy_mlp", layout="ddp")
        with pytest.raises(UserError, match=rf"rank 0 \(node 0\): MASTER_PORT={port} is in use; give") as caught:
            require_free(asked, first)
        assert caught.value.exit_code == ExitCode.RESOURCES
        require_free(asked, replace(first, rank=1, local_rank=1))
        require_free(asked, replace(first, agent_serves_store=True))
    require_free(asked, first)


def test_no_rank_meets_the_process_that_only_asks_for_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("a rank could connect, and be cut off"))
    first = World(world_size=2, nproc_per_node=2, store_host="127.0.0.1", store_port=free_port())
    require_free(Asked(experiment="toy_mlp", layout="ddp"), first)
