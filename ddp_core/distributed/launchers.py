"""What launchers other than torchrun tell a process of its place, in one table: schedulers, MPI and Kubernetes.

A launcher starts either one process for each rank, or one for each node, which then starts that node's ranks itself:

| launcher | known by | a process is | its place | where rank 0 or the first node is |
|---|---|---|---|---|
| Open MPI | OMPI_COMM_WORLD_SIZE | a rank | OMPI_COMM_WORLD_RANK, _LOCAL_RANK, _LOCAL_SIZE | MASTER_ADDR, MASTER_PORT |
| SLURM, several tasks on a node | SLURM_STEP_ID | a rank | SLURM_PROCID, _LOCALID, _NODEID | SLURM_STEP_NODELIST |
| SLURM, a task on each node | SLURM_STEP_ID | a node | SLURM_NODEID | SLURM_STEP_NODELIST |
| MPICH, Intel MPI | PMI_SIZE | a rank | PMI_RANK, MPI_LOCALRANKID, MPI_LOCALNRANKS | MASTER_ADDR, MASTER_PORT |
| Pods, also Kubeflow's | PET_NNODES | a node | PET_NODE_RANK, PET_NPROC_PER_NODE | PET_MASTER_ADDR, PET_MASTER_PORT |
| Kubernetes' Indexed Job | JOB_COMPLETION_INDEX | a node | the index | only the user's options say |

The first launcher in this order counts, because it is the innermost: mpirun itself starts its daemons with srun, and
Kubeflow starts its pods as an Indexed Job. An sbatch script has SLURM's variables for a job, too, but no step's: it is
no task of a launch. torchrun's own variables (RANK and WORLD_SIZE, see world.py) go before all of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_core.base.errors import UserError

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Ports for SLURM's jobs: below those that systems give to outgoing connections."""


@dataclass(frozen=True)
class Node:
    """The place of a process that is started once on each node, and starts the ranks of its node itself."""

    launcher: str
    node_rank: int
    nnodes: int | None
    """None where the launcher does not tell."""
    endpoint: str | None = None
    """HOST:PORT of the first node, where the others meet it."""
    launch_id: str | None = None
    """An id that all nodes have and no earlier launch had; None where the launcher gives no such id."""
    gpus: int | None = None
    """GPUs given to this node; None where the launcher does not tell."""
    cpus: int | None = None
    """Cores asked for on this node; None where the launcher does not tell."""
    nproc_per_node: int | None = None
    """Ranks of each node; None where the launcher does not tell."""

    @property
    def is_first(self) -> bool:
        """Whether the others meet at this node."""
        return self.node_rank == 0

    @property
    def description(self) -> str:
        """This place in words, for messages: `node 1 of 2, started by SLURM`."""
        count = "" if self.nnodes is None else f" of {self.nnodes}"
        return f"node {self.node_rank}{count}, started by {self.launcher}"


def ranks_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The place of a process that a launcher started as a rank among others, in torchrun's variables; else empty."""
    if _count(environ, "OMPI_COMM_WORLD_SIZE") > 1:
        return _under_mpi(environ, "Open MPI", [f"OMPI_COMM_WORLD_{name}" for name in _OPEN_MPI])
    if (tasks := _slurm_tasks(environ)) > 1:
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM")
        return _slurm_rank(environ, tasks, nodes) if tasks > nodes else {}
    if _count(environ, "PMI_SIZE") > 1:
        return _under_mpi(environ, "MPI (PMI)", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    return {}


def nodes_place(environ: Mapping[str, str]) -> Node | None:
    """The place of a process that a launcher started once on each of several nodes; None for any other process."""
    if ranks_place(environ):
        return None
    if (tasks := _slurm_tasks(environ)) > 1:
        return Node(
            "SLURM",
            _number(environ, "SLURM_NODEID", "SLURM"),
            tasks,
            f"{_first_host(environ)}:{_slurm_port(environ)}",
            _slurm_id(environ),
            gpus=_count(environ, "SLURM_GPUS_ON_NODE") or None,
            cpus=_count(environ, "SLURM_CPUS_PER_TASK") or None,
        )
    if "PET_NNODES" in environ:
        return None if environ["PET_NNODES"] == "1" else _under_kubernetes(environ)
    if "JOB_COMPLETION_INDEX" in environ:
        index = _number(environ, "JOB_COMPLETION_INDEX", "a Kubernetes Indexed Job")
        return Node("a Kubernetes Indexed Job", index, None)
    return None


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        found = f"{name}={text!r} is not a number" if name in environ else f"{name} is missing"
        raise UserError(f"{launcher} started this process, but {found}; start `ddp train` as the launcher's own task")
    return int(text)


def _count(environ: Mapping[str, str], name: str) -> int:
    """The number that a variable holds; 0 where the variable is not set, or holds something else."""
    text = environ.get(name, "")
    return int(text) if text.isdigit() else 0


def _under_mpi(environ: Mapping[str, str], launcher: str, names: Sequence[str]) -> dict[str, str]:
    """A rank's place in torchrun's variables; `names`: MPI's of rank, world_size, local_rank and nproc_per_node."""
    rank, size, local_rank, nproc_per_node = (_number(environ, name, launcher) for name in names)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        raise UserError(
            f"{launcher} started {size} processes, but nothing says where rank 0 is: set MASTER_ADDR (the host of rank "
            "0) and MASTER_PORT (a free port there) for all of them, for example `mpirun -x MASTER_ADDR=… -x "
            "MASTER_PORT=29500 …`"
        )
    place = (rank, size, local_rank, nproc_per_node, rank // max(1, nproc_per_node))
    return dict(zip(_PLACE, (*map(str, place), environ["MASTER_ADDR"], environ["MASTER_PORT"]), strict=True))


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of the step that this process is a task of; 0 in the shell of a batch job, and without SLURM."""
    return _count(environ, "SLURM_STEP_NUM_TASKS") if "SLURM_STEP_ID" in environ else 0


def _slurm_rank(environ: Mapping[str, str], tasks: int, nodes: int) -> dict[str, str]:
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    # SLURM writes "2(x3)" for two tasks on each of three nodes, and "2(x2),1" for unlike numbers of tasks.
    if per_node not in (f"{tasks // nodes}(x{nodes})", str(tasks)) or tasks % nodes:
        raise UserError(
            f"SLURM started {tasks} tasks on {nodes} nodes, {per_node or 'unknown numbers'} on each: "
            "ask for the same number on all of them, with --ntasks-per-node"
        )
    rank, local_rank, node_rank = (
        _number(environ, name, "SLURM") for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    )
    host = "127.0.0.1" if nodes == 1 else _first_host(environ)
    place = (rank, tasks, local_rank, tasks // nodes, node_rank, host, _slurm_port(environ))
    return {**dict(zip(_PLACE, map(str, place), strict=True)), "TORCHELASTIC_RUN_ID": _slurm_id(environ)}


def _first_host(environ: Mapping[str, str]) -> str:
    """The first of a list such as `gpu[03-05,9],login`: gpu03. Raises UserError without a list."""
    names = environ.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", names)
    if first is None:
        raise UserError("SLURM started this process, but SLURM_STEP_NODELIST, the list of its nodes, is missing")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port that differs between jobs that run at the same time on a node, and between the steps of a job."""
    job, step = (_number(environ, name, "SLURM") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (101 * job + step) % _PORTS


def _slurm_id(environ: Mapping[str, str]) -> str:
    """The launch's id: the same on all nodes, and another after a requeue, which starts the job's steps anew."""
    step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return f"slurm-{step}-{_count(environ, 'SLURM_RESTART_COUNT')}"


def _under_kubernetes(environ: Mapping[str, str]) -> Node:
    launcher = "Kubernetes (PET_*)"
    nnodes, node_rank = (_number(environ, name, launcher) for name in ("PET_NNODES", "PET_NODE_RANK"))
    if node_rank >= nnodes:
        raise UserError(f"PET_NODE_RANK={node_rank} is outside of PET_NNODES={nnodes}")
    missing = [name for name in ("PET_MASTER_ADDR", "PET_MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UserError(f"{launcher} started {nnodes} nodes, but {missing[0]}, where they meet, is missing")
    host, port = environ["PET_MASTER_ADDR"], _number(environ, "PET_MASTER_PORT", launcher)
    return Node(
        launcher,
        node_rank,
        nnodes,
        f"{host}:{port}",
        nproc_per_node=_count(environ, "PET_NPROC_PER_NODE") or None,
    )
