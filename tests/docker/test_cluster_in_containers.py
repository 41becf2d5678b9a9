"""Several nodes in containers, driven as `make cpu-cluster` does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import docker
import pytest

from ddp_lab.cluster.cluster import Spec, wait_for
from ddp_lab.cluster.containers import ContainerBackend
from ddp_lab.cluster.verdict import judge
from tests.docker.conftest import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


def test_baseline_then_two_nodes_with_two_processes_then_the_table(image: str, tmp_path: Path) -> None:
    options = ["--output", str(tmp_path / "outputs"), "--data-dir", str(tmp_path / "data"), "--set", "epochs=1"]
    done = subprocess.run(
        [sys.executable, "-m", "ddp_lab.cluster", "up", "--backend", "docker", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, _, table = done.stdout.rpartition("cluster: node-2 exited with 0 (done)")
    assert "single | " in before
    assert "ddp-2x2-cpu" in table
    assert "single-cpu" in table
    assert "digests: 2 exact runs, identical" in table
    records = [json.loads(path.read_text()) for path in (tmp_path / "outputs").glob("*/*/run.json")]
    assert len(records) == 2
    assert len({(record["weights_sha256"], record["optimizer_sha256"]) for record in records}) == 1


def test_bad_setting_ends_every_node_with_2(image: str, engine: docker.DockerClient, tmp_path: Path) -> None:
    spec = Spec("digits", nnodes=2, options=("--set", "global_batch=1"), output=tmp_path, data=tmp_path)
    said: list[str] = []
    backend = ContainerBackend()
    try:
        backend.start(spec)
        backend.follow(lambda node, line: said.append(line))
        verdict = judge(wait_for(backend, patience=60, deadline=200))
    finally:
        backend.stop()
    assert verdict.exit_code == 2
    assert any("global_batch_size" in line for line in said)
    assert not any("Traceback" in line for line in said)
    label = {"label": f"com.docker.compose.project=ddp-{spec.launch_id}"}
    assert not engine.containers.list(all=True, filters=label)
    assert not engine.networks.list(filters=label)
