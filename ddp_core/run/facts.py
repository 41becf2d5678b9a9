"""What all ranks must have in common before they train: each tells it once, and all look at what everybody told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.data.data_digest import DataDigest
from ddp_core.distributed.process_group import Collectives


@dataclass(frozen=True)
class Facts:
    """What one rank was started with, and what it has built."""

    named: Mapping[str, str]
    """Version, request and the digest of each of the user's files, by the name that an error message gives them."""
    model: Sequence[str]
    """A line for each parameter and buffer: name, shape, type, and whether it is trained; not its values."""
    data: DataDigest | None
    """Without its parts; None where one rank of each node has yet to read the files."""
    fingerprint: Mapping[str, Any]

    def of_all(self, collectives: Collectives) -> list[Facts]:
        """The facts of all ranks; a collective. Raises UserError, on every rank, where code, request or model differ.

        A file that only some ranks have imported is not compared: rank 0 may load TensorBoard, the others do not.
        """
        everyones: list[Facts] = collectives.gather(self)
        first = everyones[0]
        for name, ours in first.named.items():
            if others := [rank for rank, theirs in enumerate(everyones) if theirs.named.get(name, ours) != ours]:
                raise UserError(
                    f"ranks {', '.join(map(str, others))} have another {name} than rank 0: "
                    "start every node with the same code and the same command"
                )
        for rank, theirs in enumerate(everyones):
            for line, other in zip_longest(first.model, theirs.model, fillvalue="nothing more"):
                if line != other:
                    raise UserError(
                        f"rank {rank} has built another model than rank 0: {other}, where rank 0 has {line}; every "
                        "rank trains the same model, so let its builder not depend on RANK, the machine, or the time"
                    )
        return everyones
