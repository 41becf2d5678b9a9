"""What a launcher outside says of this process's place among others, as options of `ddp train`."""

from __future__ import annotations

from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.config.options import Asked, NodeRange
from ddp_core.distributed.launchers import Node
from ddp_core.distributed.world import World

_ALONE = "for a training of its own in each process, say --nnodes 1"


def follow_launcher(asked: Asked, world: World, node: Node | None) -> tuple[Asked, bool]:
    """What was asked, with layout, nodes, ranks and meeting place from the launcher; and whether the nodes meet here.

    `node`: the place of this process, if it was started once on each node. What the user has given is kept. Raises
    UserError where it contradicts what the launcher has started.
    """
    given = asked.model_fields_set
    if world.world_size > 1:
        return (asked if "layout" in given else asked.model_copy(update={"layout": "ddp"})), False
    if node is None or ("nnodes" in given and asked.nnodes.high == 1):
        return asked, False
    _require_whole(asked, node)
    found: dict[str, Any] = {"layout": "ddp"}
    if node.nnodes is not None and "nnodes" not in given:
        found["nnodes"] = NodeRange(node.nnodes, node.nnodes)
    if asked.rdzv_endpoint is None:
        found["rdzv_endpoint"] = node.endpoint
    if asked.rdzv_id is None:
        found["rdzv_id"] = node.launch_id
    if asked.nproc_per_node is None:
        # One rank for each GPU given to the node, else one for each core asked for.
        gpus = node.gpus if asked.device != "cpu" else None
        if count := node.nproc_per_node or gpus or node.cpus:
            found["nproc_per_node"] = count
    return asked.model_copy(update=found), asked.rdzv_endpoint is None and node.is_first


def _require_whole(asked: Asked, node: Node) -> None:
    """Raises UserError where the options contradict the launcher, or both together do not tell enough."""
    given = asked.model_fields_set
    if "layout" in given and asked.layout != "ddp":
        raise UserError(
            f"this is {node.description}, but layout {asked.layout} is one process: each node would train the same by "
            f"itself; use --layout ddp, or {_ALONE}"
        )
    low, high = asked.nnodes
    if "nnodes" in given and node.nnodes is not None and not low <= node.nnodes <= high:
        raise UserError(f"--nnodes {asked.nnodes}, but this is {node.description}")
    wanted = {
        "--nnodes N": node.nnodes is not None or "nnodes" in given,
        "--rdzv-endpoint HOST:PORT": node.endpoint is not None or asked.rdzv_endpoint is not None,
        "--rdzv-id ID": node.launch_id is not None or asked.rdzv_id is not None,
    }
    missing = [option for option, known in wanted.items() if not known]
    if missing:
        raise UserError(
            f"this is {node.description}, which does not tell all that a launch of several nodes needs: add "
            f"{', '.join(missing)}, the same on every node, with an id that was never used before; or {_ALONE}"
        )
