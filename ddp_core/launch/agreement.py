"""Launchers of several nodes compare their requests before any worker starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import WorkerGroup

from ddp_core.base.errors import UserError
from ddp_core.experiment.request import Request
from ddp_core.record.environment import facts_of

_OF_ONE_NODE = {"data_dir", "faults", "log_to", "output", "profile", "workers"}
"""Options that may differ between nodes: folders, what only rank 0 does, and faults made on purpose."""


def facts_of_nodes(request: Request) -> dict[str, str]:
    """What all nodes of a launch must have in common, by the name that an error message gives it."""
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in request.options if name not in _OF_ONE_NODE}
    return {**facts_of(request), "experiment file": request.source_sha256, **options}


def require_same_request(nodes: WorkerGroup, facts: Mapping[str, str]) -> None:
    """Raises UserError on every node where a fact differs between the nodes that have met. Waits for all of them.

    `nodes`: how torch's agent notes a round of the rendezvous; its store is the same for all nodes of the round.
    """
    # torch declares these as None, which they are until the nodes have met.
    store, node_rank, count = cast("tuple[Store, int, int]", (nodes.store, nodes.group_rank, nodes.group_world_size))
    if count < 2:
        return
    store.set(f"ddp/request/{node_rank}", json.dumps(facts))
    seen = [json.loads(store.get(f"ddp/request/{node}")) for node in range(count)]
    for name, ours in seen[0].items():
        other = [node for node, theirs in enumerate(seen) if theirs.get(name) != ours]
        if other:
            who = ("node " if len(other) == 1 else "nodes ") + ", ".join(map(str, other))
            have = "has" if len(other) == 1 else "have"
            raise UserError(
                f"{who} {have} another {name} than node 0: start every node with the same code and the same command"
            )
