"""A real SLURM on this machine, three nodes with addresses of their own: one training, whatever srun starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Ended, train, trained, wait_until

SLURM = Path(__file__).with_name("slurm-up")
TOY = ("toy_mlp", "--device", "cpu")
SECONDS = 180

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for network namespaces"),
    pytest.mark.skipif(
        not shutil.which("slurmctld") and "DDP_INSTALL_SLURM" not in os.environ,
        reason="SLURM is not installed; `make test-cluster` installs Debian's",
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which srun finds the cluster, which is started here and ended afterwards."""
    home = {"SLURM_UP_DIR": str(tmp_path_factory.mktemp("slurm") / "home")}
    started = subprocess.run(
        [SLURM, "--env"], env=os.environ | home, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    try:
        assert started.returncode == 0, started.stderr
        exports = dict(re.findall(r"^export (\w+)=(.*)$", started.stdout, re.MULTILINE))
        yield {**os.environ, **exports, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finally:
        subprocess.run([SLURM, "--stop"], env=os.environ | home, capture_output=True, timeout=SECONDS, check=False)


def srun(slurm: dict[str, str], options: str, *words: object) -> Ended:
    """Run `ddp WORDS` under srun. Raises subprocess.TimeoutExpired after SECONDS."""
    command = ["srun", *options.split(), sys.executable, "-m", "ddp_core", *map(str, words)]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=SECONDS, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the single process."""
    output = tmp_path_factory.mktemp("single")
    train(output, *TOY)
    return str(trained(output)[1]["weights_sha256"])


@pytest.mark.parametrize(
    ("options", "words", "label"),
    [
        ("--nodes 2 --ntasks-per-node 1", ["--nproc-per-node", "2"], "ddp-2x2-cpu"),
        ("--nodes 3 --ntasks-per-node 1 --cpus-per-task 1", [], "ddp-3x1-cpu"),
        ("--nodes 2 --ntasks-per-node 2", [], "ddp-2x2-cpu"),
        ("--nodes 1 --ntasks 2", [], "ddp-1x2-cpu"),
    ],
)
def test_what_srun_starts_is_one_training(
    slurm: dict[str, str], expected: str, tmp_path: Path, options: str, words: list[str], label: str
) -> None:
    ended = srun(slurm, options, "train", *TOY, *words, "--output", tmp_path)
    assert ended.code == 0, ended.output + ended.errors
    _, record = trained(tmp_path)
    assert (record["weights_sha256"], record["layout"]["label"]) == (expected, label)


@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        ("--nodes 2 --ntasks 3", [], "3 tasks on 2 nodes"),
        ("--nodes 2 --ntasks-per-node 1", ["--layout", "single"], "layout single is one process"),
        ("--nodes 2 --ntasks-per-node 1", ["--nnodes", "3"], "--nnodes 3, but this is node"),
    ],
)
def test_what_contradicts_itself_trains_nothing(
    slurm: dict[str, str], tmp_path: Path, options: str, words: list[str], said: str
) -> None:
    ended = srun(slurm, options, "train", *TOY, *words, "--output", tmp_path)
    assert (ended.code, said in ended.errors) == (2, True), ended.errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", ["--nodes 2 --ntasks-per-node 1", "--nodes 2 --ntasks-per-node 2"])
def test_scancel_saves_and_another_step_continues(slurm: dict[str, str], tmp_path: Path, options: str) -> None:
    words = ["train", "digits", "--device", "cpu", "--set", "epochs=4", "--output"]
    train(tmp_path / "single", *words[1:-1])
    expected = trained(tmp_path / "single")[1]["weights_sha256"]
    output = tmp_path / "stopped"
    command = ["srun", *options.split(), sys.executable, "-m", "ddp_core", *words, str(output)]
    with subprocess.Popen(command, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
        wait_until(lambda: list(output.glob("*/*/heartbeats/rank-3.json")), SECONDS, "all ranks train")
        job = subprocess.run(["squeue", "-h", "-o", "%A"], env=slurm, capture_output=True, text=True, check=True)
        subprocess.run(["scancel", "--signal=TERM", *job.stdout.split()], env=slurm, check=True)
        said, _ = started.communicate(timeout=SECONDS)
    assert (started.returncode, trained(output)[1]["status"]) == (75, "stopped"), said
    ended = srun(slurm, "--nodes 3 --ntasks-per-node 1 --cpus-per-task 1", *words, output, "--resume", "auto")
    assert ended.code == 0, ended.output + ended.errors
    assert trained(output)[1]["weights_sha256"] == expected


def test_doctor_says_what_would_start(slurm: dict[str, str]) -> None:
    ended = srun(slurm, "--nodes 2 --ntasks-per-node 1 --cpus-per-task 2", "doctor")
    assert "this is node 1 of 2, started by SLURM; `ddp train` starts the 2 ranks of this node" in ended.output
    assert "the nodes meet at node1:" in ended.output
