"""What something changes between an update and the next step on some ranks alone: a callback of one rank, lost bits.

Every rank would compute its gradients with other weights. Where optimizer state is cut among ranks the next update also
spreads what was changed, and no comparison of the ranks shows it any more. So weights are looked at in every step:
torch counts the writes to a tensor. Writes through `.data` are not counted. What a rank owns alone cannot be compared
with anything but itself, so there a checksum from right after the update is compared before a save.
"""

from __future__ import annotations

from torch import nn

from ddp_core.base.digests import checksum
from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import writes_to
from ddp_core.distributed.process_group import Collectives
from ddp_core.sharding.ownership import Ownership


class BetweenUpdates:
    """Which of a module's parameters were written to since the last update."""

    def __init__(self, module: nn.Module) -> None:
        self._named = dict(module.named_parameters())
        self.updated()

    def updated(self) -> None:
        """Call this right after each update."""
        self._writes = self._now()

    def changed(self) -> list[str]:
        """The parameters that were written to since then."""
        if (now := self._now()) == self._writes:
            return []
        return [name for name, writes, before in zip(self._named, now, self._writes, strict=True) if writes != before]

    def require_same(self, changed: list[str], collectives: Collectives, are_whole: bool, where: str) -> None:
        """Raise UserError (2) on every rank where `changed`, and what the parameters hold, is not the same on all.

        A collective. `are_whole`: whether every rank has whole parameters; else only their names are compared. `where`
        begins the message.
        """
        everyones = collectives.gather(changed)
        for name in sorted({each for theirs in everyones for each in theirs}):
            ranks = [rank for rank, theirs in enumerate(everyones) if name in theirs]
            alike = len(ranks) == len(everyones)
            if are_whole:
                alike = len(set(collectives.gather(checksum(self._named[name])))) == 1
            if not alike:
                everywhere = len(ranks) == len(everyones)
                which = "otherwise on each rank" if everywhere else f"on rank {', '.join(map(str, ranks))} alone"
                raise UserError(
                    f"{where}: parameter {name} was changed after the last update, {which}: a callback that changes "
                    'weights needs `ranks = "all"`, and must do the same on each rank'
                )

    def _now(self) -> list[int]:
        return [writes_to(parameter) for parameter in self._named.values()]


class OwnPart:
    """Whether what this rank owns alone is still as an update has left it. All ranks call the same methods."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._step: int | None = None
        self._sums: dict[str, str] = {}

    def updated(self, step: int) -> None:
        """Call this right after the update that ends `step`, before `require_same` of the same step."""
        self._step, self._sums = step, self._now()

    def require_same(self, step: int, collectives: Collectives, so: str) -> None:
        """Raise UserError (2) on every rank where a rank's part has changed since that update; `so`: what comes of it.

        A collective where ranks own something alone. Of another step than that of `updated` nothing is known.
        """
        if not self._ownership.owns_alone or self._step != step:
            return
        changed = next((name for name, value in self._now().items() if self._sums.get(name) != value), None)
        for rank, name in enumerate(collectives.gather(changed)):
            if name is not None:
                raise UserError(
                    f"after step {step} {name} of rank {rank}, which no other rank has a copy of, is not what the "
                    f"update has left there, so {so}: a callback has changed it, or memory has lost a bit"
                )

    def _now(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self._ownership.owned_alone()}
