"""This process's place among all: the only module that reads or writes the variables by which a launcher tells it.

| variable | set by | meaning here |
|---|---|---|
| RANK, WORLD_SIZE | torchrun, torch.distributed.launch, a scheduler | rank, world_size |
| LOCAL_RANK, LOCAL_WORLD_SIZE | the same | local_rank, nproc_per_node |
| GROUP_RANK | torchrun | node_rank |
| MASTER_ADDR, MASTER_PORT | the same as RANK | store_host, store_port: where the process group's store is |
| TORCHELASTIC_USE_AGENT_STORE | torchrun | agent_serves_store: its agent serves that store, so rank 0 must not |
| TORCHELASTIC_RUN_ID | torchrun | launch_id: the same for all workers and restarts of one launch |
| TORCHELASTIC_RESTART_COUNT | torchrun | restart_count: 0 at first; nodes of one round may differ later |
| DDP_REPORT_DIR | `ddp train` | report_dir: where a worker writes how it ended, for the launcher to print it once |
| DDP_MEMBER | `ddp train` with live recovery | member: the name of this process, which no other one has had |
| DDP_MEMBERS_AT | the same | members_at: HOST:PORT/PREFIX, the part of a store that has the list of members |

Where RANK and WORLD_SIZE are not set, launchers.py translates what SLURM, MPI and others set in their place.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.launchers import Node, nodes_place, ranks_place

__all__ = ["World", "free_port", "node_here", "without_launch"]

_TORCHRUNS = {"RANK", "WORLD_SIZE"}
"""Where both are set, the launcher is torchrun, or another one that sets the same variables."""
_PORTS = range(10_000, 29_000)
"""Below those that a system gives to connections (Linux: from 32768 on): such a port, found free, may be a connection's
own before the store listens, seconds later, on a busy machine. torch's own default ports are not among them."""


@dataclass(frozen=True)
class World:
    """The place of this process among all: ranks, counts, the launch it belongs to."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    nproc_per_node: int = 1
    node_rank: int = 0
    store_host: str | None = None
    store_port: int | None = None
    agent_serves_store: bool = False
    launch_id: str | None = None
    restart_count: int = 0
    report_dir: Path | None = None
    nodes_share_gpus: bool = False
    """Whether all nodes see the same GPUs, as containers on one machine do."""
    member: str | None = None
    """None where a loss ends all processes."""
    members_at: str | None = None
    membership: int | None = None
    """The number of the membership that the ranks belong to; None before there is one, and where a loss ends all."""
    started_as: int | None = None
    """The local rank that this process was started with, where its local rank may change; else None."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the rank that writes files and prints for the user."""
        return self.rank == 0

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.nproc_per_node

    @property
    def place(self) -> str:
        """'rank 3 (node 1)', for messages."""
        return f"rank {self.rank} (node {self.node_rank})"

    @property
    def device_number(self) -> int:
        """Which of the GPUs that it sees this process takes.

        In a live recovery local ranks change, and no process goes to another one's GPU for that.
        """
        if self.nodes_share_gpus:
            return self.rank
        return self.local_rank if self.started_as is None else self.started_as

    @property
    def serves_store(self) -> bool:
        """Whether this process serves the process group's store: as rank 0, where no launcher's store is there."""
        return self.world_size > 1 and self.is_first and not self.agent_serves_store and self.members_at is None

    @property
    def port_name(self) -> str:
        """What the user calls the port of the process group's store, for `listen_at` and `require_port`."""
        return f"{self.place}: MASTER_PORT={{port}}"

    @staticmethod
    def is_set(environ: Mapping[str, str] = os.environ) -> bool:
        """Whether a launcher has already made this process a worker."""
        try:
            return environ.keys() >= _TORCHRUNS or bool(ranks_place(environ))
        except UserError:
            return False  # `from_environment` tells the user what is wrong

    @staticmethod
    def may_print(environ: Mapping[str, str] = os.environ) -> bool:
        """Whether this process prints for the user: it is rank 0, or no launcher has started it."""
        try:
            return World.from_environment(environ).is_first
        except UserError:
            return True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> World:
        """The place that the launcher gave, checked. Raises UserError naming the variable that is missing or wrong."""
        if not environ.keys() >= _TORCHRUNS:
            place = ranks_place(environ)
            if not place:
                return cls()
            environ = {**environ, **place}

        def number(name: str, default: int | None = None) -> int:
            text = environ.get(name)
            if text is None and default is not None:
                return default
            try:
                return int(text or "")
            except ValueError:
                raise UserError(f"{name}={text!r} is not a number; start this with torchrun or `ddp train`") from None

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        local_rank = number("LOCAL_RANK", rank)
        nproc_per_node = number("LOCAL_WORLD_SIZE", world_size)
        if not 0 <= rank < world_size:
            raise UserError(
                f"RANK={rank} is outside of WORLD_SIZE={world_size}; give every process another rank from 0"
            )
        if nproc_per_node < 1 or world_size % nproc_per_node:
            raise UserError(f"WORLD_SIZE={world_size} is not a multiple of LOCAL_WORLD_SIZE={nproc_per_node}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if (world_size > 1 or "DDP_MEMBER" in environ) and name not in environ:
                raise UserError(f"RANK is set but {name} is not; start this with torchrun or `ddp train`")
        reports, member = environ.get("DDP_REPORT_DIR"), environ.get("DDP_MEMBER")
        has_peers = world_size > 1 or member is not None
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            nproc_per_node=nproc_per_node,
            node_rank=number("GROUP_RANK", rank // nproc_per_node),
            # A single process needs no store: its MASTER_ADDR and MASTER_PORT may be missing or wrong.
            store_host=environ["MASTER_ADDR"] if has_peers else None,
            store_port=number("MASTER_PORT") if has_peers else None,
            agent_serves_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            # "none" is torchrun's own default, which identifies no launch.
            launch_id=None if (identity := environ.get("TORCHELASTIC_RUN_ID")) == "none" else identity,
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
            report_dir=Path(reports) if reports else None,
            nodes_share_gpus=bool(environ.get("DDP_NODES_SHARE_GPUS")),
            member=member,
            members_at=environ.get("DDP_MEMBERS_AT"),
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that give this place to another process: `from_environment` reads it from them."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.nproc_per_node,
            "GROUP_RANK": self.node_rank,
            "MASTER_ADDR": self.store_host,
            "MASTER_PORT": self.store_port,
            "TORCHELASTIC_USE_AGENT_STORE": True if self.agent_serves_store else None,
            "TORCHELASTIC_RUN_ID": self.launch_id,
            "TORCHELASTIC_RESTART_COUNT": self.restart_count or None,
            "DDP_REPORT_DIR": self.report_dir,
            "DDP_NODES_SHARE_GPUS": 1 if self.nodes_share_gpus else None,
            "DDP_MEMBER": self.member,
            "DDP_MEMBERS_AT": self.members_at,
        }
        return {name: str(value) for name, value in variables.items() if value is not None}


def node_here(environ: Mapping[str, str] = os.environ) -> Node | None:
    """The place of this process where a launcher has started it once on each of several nodes; else None."""
    return None if environ.keys() >= _TORCHRUNS else nodes_place(environ)


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that make a process a part of a launch, and known to its launcher."""
    begins = ("TORCHELASTIC_", "DDP_MEMBER", "DDP_REPORT_DIR")
    return {name: value for name, value in environ.items() if not name.startswith(begins)}


def missing_nodes(asked: int, came: int) -> UserError:
    """The error (6) for a launch of which another number of nodes has come than was asked for."""
    return UserError(
        f"asked for {asked} nodes, but the launcher started {came}: some did not come in time", ExitCode.PEERS_LOST
    )


def free_port() -> int:
    """A TCP port of this machine on which nothing listens at this moment, for the store of a launch."""
    # Drawn neither from the user's generator nor from one that forked processes have alike.
    begin = random.SystemRandom().randrange(len(_PORTS))
    for port in itertools.chain(_PORTS[begin:], _PORTS[:begin]):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError(f"no free port between {_PORTS[0]} and {_PORTS[-1]} on this machine", ExitCode.RESOURCES)
