"""Nodes in containers, driven as `make cpu-cluster` does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import ran

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


def test_baseline_then_two_nodes_with_two_processes_then_the_table(image: str, tmp_path: Path) -> None:
    options = ["--output", str(tmp_path / "outputs"), "--data-dir", str(tmp_path / "data"), "--set", "epochs=1"]
    done = ran(sys.executable, "-m", "ddp_lab.cluster", "up", "--backend", "docker", *options, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    before, _, table = done.stdout.rpartition("cluster: node-2 exited with 0 (done)")
    assert "single | " in before
    assert "ddp-2x2-cpu" in table
    assert "single-cpu" in table
    assert "digests: 2 exact runs, identical" in table
    records = [json.loads(path.read_text()) for path in (tmp_path / "outputs").glob("*/*/run.json")]
    assert len(records) == 2
    assert len({(record["weights_sha256"], record["optimizer_sha256"]) for record in records}) == 1
