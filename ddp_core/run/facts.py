"""What all ranks must have in common before they train: each tells it once, and all look at what everybody told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.data.data_digest import DataDigest
from ddp_core.distributed.process_group import Collectives


class Facts(NamedTuple):
    """What one rank was started with, and what it has built."""

    named: Mapping[str, str]
    """Version, request and the digest of each of the user's files, by the name that an error message gives them."""
    model: Sequence[str] = ()
    """A line for each parameter and buffer: name, shape, type, and whether it is trained; not its values."""
    data: DataDigest | None = None
    """Without its parts; None where one rank of each node has yet to read the files."""
    fingerprint: Mapping[str, Any] | None = None
    """None where this rank could not build the experiment."""


def facts_of_all(collectives: Collectives, ours: Facts) -> list[Facts]:
    """The facts of all ranks; a collective. Raises UserError, on every rank, where code, request or model differ.

    A rank that could not build the experiment tells what it was started with, too, since that may be why. Raises
    UserError (6) on the other ranks then. A file that only some ranks have imported is not compared.
    """
    data: Any = ours.data and (ours.data.sha256, ours.data.digest_of, {}, ours.data.sampled)
    # Plain types: ranks with another version of this program must be able to read them.
    told = collectives.gather((dict(ours.named), list(ours.model), data, ours.fingerprint))
    everyones = [Facts(named, model, data and DataDigest(*data), prints) for named, model, data, prints in told]
    first = everyones[0]
    for name, value in first.named.items():
        if others := [rank for rank, theirs in enumerate(everyones) if theirs.named.get(name, value) != value]:
            raise UserError(
                f"ranks {', '.join(map(str, others))} have another {name} than rank 0: "
                "start every node with the same code and the same command"
            )
    if ours.fingerprint is None:
        return everyones
    for rank, theirs in enumerate(everyones):
        if theirs.fingerprint is None:
            raise UserError(
                f"rank {rank} could not build the experiment; its own message says why", ExitCode.PEERS_LOST
            )
        for line, other in zip_longest(first.model, theirs.model, fillvalue="nothing more"):
            if line != other:
                raise UserError(
                    f"rank {rank} has built another model than rank 0: {other}, where rank 0 has {line}; every rank "
                    "trains the same model, so let its builder not depend on RANK, the machine, or the time"
                )
    return everyones
