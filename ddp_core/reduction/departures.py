"""Sends gradients as soon as backward has made them: hooks on the parameters, in the place of DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ddp_core.base.user_code import our_code

from .early_additions import twice
from .shards import Shards


class Departures:
    """Calls `send` for each flat group of `shards` once, always from the last to the first.

    Backward makes gradients in about this sequence. A group is sent as soon as all of its gradients are there and the
    groups before it are sent; the rest, of which some parameter has no gradient, after backward. So every rank sends
    the groups in one sequence, whatever its micro-batches use. `send` is given the group's number.
    """

    def __init__(self, shards: Shards, send: Callable[[int], None]) -> None:
        self._shards, self._send = shards, send
        self._watching = False
        self._next = -1
        self._missing: list[set[int]] = []
        self._hooks = [
            shards.parameters[position].register_post_accumulate_grad_hook(partial(self._made, number, position))
            for number, group in enumerate(shards.groups)
            for position in group.positions
        ]

    def begin(self, watching: bool = True) -> None:
        """All groups are still to be sent: by the hooks of the backward that follows, or by `send_rest`."""
        self._missing = [set(group.positions) for group in self._shards.groups]
        self._next, self._watching = len(self._missing) - 1, watching

    def stop(self) -> None:
        """Send nothing more from hooks."""
        self._watching = False

    def send_rest(self) -> None:
        """Send the groups that are not sent yet."""
        self._watching = False
        while self._next >= 0:
            self._send_next()

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    @our_code
    def _made(self, number: int, position: int, parameter: Tensor) -> None:
        if not self._watching:
            return
        if number > self._next:
            raise twice(parameter)
        self._missing[number].discard(position)
        while self._next >= 0 and not self._missing[self._next]:
            self._send_next()

    def _send_next(self) -> None:
        # Counted first: what fails in `send` is not sent again.
        self._next -= 1
        self._send(self._next + 1)
