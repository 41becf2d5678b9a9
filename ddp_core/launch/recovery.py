"""Which recovery a launch can have: `live`, in which the others go on without a lost rank, or `restart`."""

from __future__ import annotations

from dataclasses import replace

from ddp_core.base.errors import UserError
from ddp_core.distributed.reports import tell_user
from ddp_core.experiment.request import Request


def with_recovery(request: Request, most_nodes: int) -> Request:
    """The request with the recovery that it can have, `live` or `restart`, on up to `most_nodes` nodes.

    `auto` becomes a restart wherever the workers cannot go on without a lost one, where nobody would be left, and where
    going on is not known to be wanted: with callbacks, which may be told of a step once more, and on GPUs, where it has
    not run over NCCL. A live one becomes a restart, and the user is told, with shards. Raises UserError (2) where it
    cannot be had for another reason.
    """
    layout, options = request.layout, request.options
    if options.recovery == "restart":
        return request
    obstacles = {
        "only with the exact reduction do fewer processes compute the same bits": options.reduction != "exact",
        "--shares is for ranks that stay the same": bool(layout.dealt),
    }
    found = next((words for words, is_so in obstacles.items() if is_so), None)
    if options.recovery == "auto":
        is_meant = (
            layout.device == "cpu"
            and most_nodes * layout.nproc_per_node > 1
            and options.max_restarts > 0
            and request.evaluated is None
            and not request.loaded.namespace.get("callbacks")
        )
        is_live = is_meant and found is None and layout.shard == "none"
        return _recovering(request, "live" if is_live else "restart")
    if found is not None:
        raise UserError(f"--recovery live cannot be had here: {found}; use --recovery restart")
    if layout.shard == "none":
        return request
    tell_user(
        f"--recovery live: with --shard {layout.shard} each part is on one rank alone, and is lost with it; where a "
        "rank is lost, all start again from the newest checkpoint, as with --recovery restart"
    )
    return _recovering(request, "restart")


def _recovering(request: Request, recovery: str) -> Request:
    return replace(request, options=request.options.model_copy(update={"recovery": recovery}))
