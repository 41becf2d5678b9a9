"""The variables of schedulers, MPI and Kubernetes: one table for all, and one training for all processes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_core.cli.train import follow_launcher
from ddp_core.config.options import Asked, NodeRange
from ddp_core.distributed.launchers import Node
from ddp_core.distributed.world import World, free_port, node_here
from tests.support.commands import forked, train, trained
from tests.support.wording import refusing

BATCH_SHELL = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
SIX_TASKS = BATCH_SHELL | {
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
A_TASK_PER_NODE = SIX_TASKS | {
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
STORE = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


ONE_POD = {"PET_NNODES": "1", "JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize("environ", [{}, BATCH_SHELL, SIX_TASKS | {"SLURM_STEP_NUM_TASKS": "1"}, ONE_POD])
def test_a_process_alone_is_alone(environ: dict[str, str]) -> None:
    assert (World.from_environment(environ), World.is_set(environ), node_here(environ)) == (World(), False, None)


def test_a_task_of_several_on_a_node_is_a_rank() -> None:
    world = World.from_environment(SIX_TASKS)
    assert (world.rank, world.world_size, world.local_rank, world.nproc_per_node) == (3, 6, 1, 2)
    assert (world.nnodes, world.node_rank, world.store_host, world.launch_id) == (3, 1, "gpu03", "slurm-77.1-0")
    assert World.is_set(SIX_TASKS)
    assert node_here(SIX_TASKS) is None
    again = World.from_environment(SIX_TASKS | {"SLURM_RESTART_COUNT": "2"})
    assert (again.launch_id, again.store_port) == ("slurm-77.1-2", world.store_port)
    assert World.from_environment(SIX_TASKS | {"SLURM_STEP_ID": "2"}).store_port != world.store_port


def test_a_task_on_each_node_is_a_node() -> None:
    assert not World.is_set(A_TASK_PER_NODE)
    node = node_here(A_TASK_PER_NODE | {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "16"})
    assert (node.node_rank, node.nnodes, node.launch_id, node.gpus, node.cpus) == (1, 3, "slurm-77.1-0", 4, 16)
    assert node.endpoint.startswith("gpu03:")
    assert not node.is_first


def test_the_first_node_of_a_list() -> None:
    ranges = {"gpu[03-05,9],login": "gpu03", "rack[0-1]n[2,4].example": "rack0n2.example", "gpu[7]": "gpu7"}
    for names, first in ({"gpu03": "gpu03", "a,b": "a"} | ranges).items():
        assert World.from_environment(SIX_TASKS | {"SLURM_STEP_NODELIST": names}).store_host == first


@pytest.mark.parametrize("environ", [OPEN_MPI | STORE, PMI | STORE, PMI | STORE | {"SLURM_JOB_ID": "1"}])
def test_a_process_of_mpi_is_a_rank(environ: dict[str, str]) -> None:
    world = World.from_environment(environ)
    assert (world.rank, world.world_size, world.local_rank, world.nproc_per_node) == (3, 4, 1, 2)
    assert (world.node_rank, world.store_host, world.store_port, world.launch_id) == (1, "node-0", 29500, None)


def test_the_innermost_launcher_counts() -> None:
    """mpirun starts its daemons with srun, and torchrun and `ddp train` their workers below either."""
    assert World.from_environment(A_TASK_PER_NODE | OPEN_MPI | STORE).world_size == 4
    torchruns = {"RANK": "1", "WORLD_SIZE": "2", **STORE}
    assert World.from_environment(SIX_TASKS | OPEN_MPI | torchruns).world_size == 2
    assert node_here(A_TASK_PER_NODE | torchruns) is None


def test_the_variables_of_torchruns_options_tell_the_nodes() -> None:
    told = Node("Kubernetes (PET_*)", 1, 2, "job-node-0-0.job:29400", nproc_per_node=4)
    assert node_here(KUBEFLOW) == told
    assert node_here(KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}) == replace(told, nproc_per_node=None)


@pytest.mark.parametrize(
    "environ",
    [
        SIX_TASKS | {"SLURM_STEP_TASKS_PER_NODE": "3,2,1"},
        SIX_TASKS | {"SLURM_PROCID": "x"},
        SIX_TASKS | {"SLURM_STEP_NODELIST": ""},
        SIX_TASKS | {"SLURM_JOB_ID": ""},
        OPEN_MPI,
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        KUBEFLOW | {"PET_MASTER_ADDR": ""},
        KUBEFLOW | {"PET_NODE_RANK": "2"},
        KUBEFLOW | {"PET_NNODES": "1:4"},
    ],
)
def test_what_cannot_be_followed_is_said(environ: dict[str, str]) -> None:
    with refusing():
        print(World.from_environment(environ), node_here(environ))


NODE = Node("SLURM", 0, 3, "gpu03:1234", "slurm-77.1-0", gpus=4, cpus=16)
POD = Node("a Kubernetes Indexed Job", 1, None)


def asked(**given: object) -> Asked:
    return Asked.model_validate({"experiment": "digits", **given})


def test_what_is_left_open_is_taken_from_the_launcher() -> None:
    followed, is_host = follow_launcher(asked(), World(), NODE)
    assert (followed.layout, followed.nnodes, followed.nproc_per_node) == ("ddp", NodeRange(3, 3), 4)
    assert (followed.rdzv_endpoint, followed.rdzv_id, is_host) == ("gpu03:1234", "slurm-77.1-0", True)
    assert follow_launcher(asked(device="cpu"), World(), NODE)[0].nproc_per_node == 16
    assert follow_launcher(asked(), World(rank=1, world_size=2, nproc_per_node=2), None)[0].layout == "ddp"
    assert follow_launcher(asked(), World(), None) == (asked(), False)


def test_what_the_user_gives_is_kept() -> None:
    words = {"nnodes": "2:3", "nproc_per_node": 2, "rdzv_endpoint": "here:1", "rdzv_id": "mine"}
    followed, is_host = follow_launcher(asked(**words), World(), NODE)
    assert (followed.nnodes, followed.nproc_per_node) == (NodeRange(2, 3), 2)
    assert (followed.rdzv_endpoint, followed.rdzv_id, is_host) == ("here:1", "mine", False)
    assert follow_launcher(asked(nnodes="1"), World(), NODE) == (asked(nnodes="1"), False)
    pods, is_host = follow_launcher(asked(nnodes="2", rdzv_endpoint="pod-0:1", rdzv_id="uid"), World(), POD)
    assert (pods.layout, is_host) == ("ddp", False)


@pytest.mark.parametrize(
    ("given", "node"),
    [
        *(({"layout": "single"}, NODE), ({"layout": "dp"}, NODE), ({"nnodes": "2"}, NODE)),
        *(({}, POD), ({}, node_here(KUBEFLOW))),
    ],
)
def test_a_contradiction_is_said(given: dict[str, str], node: Node) -> None:
    with refusing():
        follow_launcher(asked(**given), World(), node)


@pytest.mark.full
def test_the_tasks_of_a_step_are_one_training(tmp_path: Path) -> None:
    step = {"NUM_NODES": "1", "NUM_TASKS": "3", "TASKS_PER_NODE": "3", "NODELIST": "localhost"}
    common = SIX_TASKS | {f"SLURM_STEP_{name}": value for name, value in step.items()}
    common |= {"SLURM_JOB_ID": str(free_port()), "SLURM_NODEID": "0", "GLOO_SOCKET_IFNAME": "lo"}
    words = ("toy_mlp", "--device", "cpu", "--set", "max_steps=6")
    with contextlib.ExitStack() as stack:
        tasks = [common | {"SLURM_PROCID": task, "SLURM_LOCALID": task} for task in "012"]
        commands = [forked("train", *words, "--output", tmp_path / "together", env=task) for task in tasks]
        started = [stack.enter_context(command) for command in commands]
        ended = [command.end() for command in started]
    assert [end.code for end in ended] == [0] * 3, ended
    record = trained(tmp_path / "together")[1]
    assert record["weights_sha256"] == train(tmp_path / "single", *words)["weights_sha256"]
    assert record["layout"]["label"] == "ddp-1x3-cpu"
