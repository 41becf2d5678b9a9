"""Weights that something changes between an update and the next step on some ranks alone: a callback of one rank.

Every rank would compute its gradients with other weights. Where optimizer state is cut among ranks the next update also
spreads what was changed, and no comparison of the ranks shows it any more. So it is looked for in every step: torch
counts the writes to a tensor. Writes through `.data` are not counted.
"""

from __future__ import annotations

from torch import nn

from ddp_core.base.digests import checksum
from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import writes_to
from ddp_core.distributed.process_group import Collectives


class BetweenUpdates:
    """Which of a module's parameters were written to since the last update."""

    def __init__(self, module: nn.Module) -> None:
        self._named = dict(module.named_parameters())
        self.updated()

    def updated(self) -> None:
        """Call this right after each update."""
        self._writes = {name: writes_to(parameter) for name, parameter in self._named.items()}

    def changed(self) -> list[str]:
        """The parameters that were written to since then."""
        return [name for name, parameter in self._named.items() if writes_to(parameter) != self._writes[name]]

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
