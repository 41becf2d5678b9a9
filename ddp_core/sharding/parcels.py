"""Gradients that travel together: filled by backward, sent when complete, in one sequence on all ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp_core.base.user_code import our_code
from ddp_core.reduction.communication import Channel
from ddp_core.reduction.flat import Gradients, record_use

from .owned import Owned, norm_of_owned
from .shards import FlatGroup

P = TypeVar("P", bound="Parcel")


class Parcel(ABC):
    """The gradients of some parameters, which are sent as one flat tensor: `cuts` says which part each rank gets.

    A parcel is open while a backward fills it, ready when all its gradients are there or none can come any more, and
    sent once in each pass (`PartShares`).
    """

    cuts: Sequence[slice]
    like: Tensor
    """An empty tensor with the dtype and device of the gradients."""
    elements: int
    """The number of elements of the flat tensor."""
    count: int
    """The number of parameters."""
    is_open = is_ready = is_sent = False
    became_ready: Callable[[], None]
    hooks: Sequence[RemovableHandle]

    def open(self) -> None:
        """Take the gradients of the backward that follows."""
        self.is_open = True

    def close(self) -> None:
        """Take no more gradients."""
        self.is_open = False

    def complete(self) -> None:
        """Be ready as it is: no more gradients will come."""
        self.is_ready = True

    @abstractmethod
    def take(self) -> tuple[Any, list[bool]]:
        """What this pass has made, for `flattened`, and for each parameter whether it has a gradient."""

    @abstractmethod
    def flattened(self, taken: Any) -> Tensor:
        """What `take` returned, laid end to end; called in the background. A missing gradient is -0.0."""

    @abstractmethod
    def give(self, total: Tensor, used: Sequence[bool]) -> None:
        """Set the `.grad` of what this rank owns to its part of the sum, or to None where a parameter was not used."""


class PartShares(ABC, Generic[P]):
    """What both `OwnShares` have in common, which bring the gradients of `parcels` to who owns them.

    Parcels are sent in sequence, once in a pass: each as soon as it is ready and those before it are sent. Backward
    makes gradients from the last layer to the first, so the parcels' sequence should be about that one. `owned` has
    what this rank owns of each parameter, `gradients` those that backward makes.
    """

    def __init__(
        self,
        parcels: Sequence[P],
        owned: Sequence[Owned],
        gradients: Gradients,
        channel: Channel,
        weights_to_compare: dist.ProcessGroup | None,
    ) -> None:
        self.gradients, self.channel, self.weights_to_compare = gradients, channel, weights_to_compare
        self._parcels = parcels
        self._trained = [each for each in owned if each.is_trained]
        self.reduced: Sequence[nn.Parameter] = [each.tensor for each in self._trained if each.tensor is not None]
        self._next = len(parcels)  # before the first pass, there is nothing to send
        for parcel in parcels:
            parcel.became_ready = self._send_ready

    def norm(self) -> Tensor:
        """The norm of the whole gradient, as on one process; a collective."""
        return norm_of_owned(self._trained, self.channel)

    def close(self) -> None:
        """Take the hooks away."""
        for parcel in self._parcels:
            for hook in parcel.hooks:
                hook.remove()

    @abstractmethod
    def _send(self, number: int) -> None:
        """Send a parcel in the background."""

    def _begin_pass(self) -> None:
        """All parcels are still to be sent."""
        self._next = 0
        for parcel in self._parcels:
            parcel.is_ready = parcel.is_sent = False

    def _send_ready(self) -> None:
        """Send what is ready, up to the first parcel that is not."""
        while self._next < len(self._parcels) and self._parcels[self._next].is_ready:
            # Counted first: what fails in `_send` is not sent again.
            number, self._next = self._next, self._next + 1
            self._parcels[number].is_sent = True
            self._send(number)

    def _send_rest(self) -> None:
        """Send the parcels that are not sent yet, complete or not."""
        for parcel in self._parcels:
            parcel.complete()
        self._send_ready()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Let the parcels take the gradients of the pass inside."""
        for parcel in self._parcels:
            parcel.open()
        try:
            yield
        finally:
            for parcel in self._parcels:
                parcel.close()

    def _give(self, totals: Sequence[Tensor], counts: Tensor) -> None:
        """Set what this rank owns to its sums; `counts`: for each parameter, how many micro-batches have used it."""
        used = iter(counts.tolist())
        for parcel, total in zip(self._parcels, totals, strict=True):
            parcel.give(total, [next(used) > 0 for _ in range(parcel.count)])


class GroupParcel(Parcel):
    """The gradients of one flat group of whole parameters, watched by hooks on these.

    `owned`: what this rank, `rank`, owns of all parameters.
    """

    _missing: set[int]
    """The parameters, by their positions, whose gradients the backward at hand has still to make."""

    def __init__(self, group: FlatGroup, owned: Sequence[Owned], rank: int, gradients: Gradients) -> None:
        self.group, self.cuts, self.count = group, group.cuts, len(group.positions)
        self.like, self.elements = group.flat[:0], group.flat.numel()
        self._owned, self._first, self._gradients = owned, group.cuts[rank].start, gradients
        self.hooks = [
            gradients.parameters[position].register_post_accumulate_grad_hook(partial(self._made, position))
            for position in group.positions
        ]

    def open(self) -> None:
        super().open()
        self._missing = set(self.group.positions)

    def take(self) -> tuple[list[Tensor | None], list[bool]]:
        taken = self._gradients.take(self.group.positions)
        return taken, [gradient is not None for gradient in taken]

    def flattened(self, taken: list[Tensor | None]) -> Tensor:
        record_use(taken)
        flat = self.group.flattened(taken)
        taken.clear()
        return flat

    def give(self, total: Tensor, used: Sequence[bool]) -> None:
        for position, begin, is_used in zip(self.group.positions, self.group.starts, used, strict=False):
            own = self._owned[position]
            if own.tensor is not None:
                start = begin + own.start - self._first
                part = total[start : start + own.stop - own.start]
                own.tensor.grad = part.view(own.tensor.shape) if is_used else None

    @our_code
    def _made(self, position: int, parameter: Tensor) -> None:
        if not self.is_open:
            return
        if self.is_sent:
            raise RuntimeError(
                f"a parameter of shape {list(parameter.shape)} got gradients twice in one backward, when the first was "
                "already used: use torch.utils.checkpoint with use_reentrant=False"
            )
        self._missing.discard(position)
        if not self._missing:
            self.is_ready = True
            self.became_ready()
