"""What this process owns of weights and optimizer state, and the whole of them, as one process has it."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.checkpoint import CutTensor, whole_tensors
from ddp_core.checkpoint.state import replaced
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.flat import in_memory_order, view_in

from .elementwise import require_elementwise
from .updates import OwnUpdates

if TYPE_CHECKING:
    from .plain_rounds import PlainRounds


@dataclass(eq=False)
class Ownership(ABC):
    """What this process owns of the state of `module` and `optimizer`, which stay the same objects.

    States go in and out in the form that they have on one process: `whole_…` returns it on rank 0 alone, and None on
    the other ranks; `own_…` returns it on every rank, with a CutTensor of what this rank owns in the place of each
    tensor that is cut. All of these are collectives, called on all ranks. What is loaded is read where it is owned: of
    tensors that lie in a mapped file, a rank touches its own part.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    has_whole_weights = True
    """Whether this process has all weights; else every forward gathers them, so all ranks must run as many."""

    @property
    def trained(self) -> dict[str, Tensor]:
        """What this process has of the trained parameters, by name."""
        return {name: each.detach() for name, each in self.module.named_parameters() if each.requires_grad}

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        """What every rank has a whole copy of, by names that a message can tell, in one sequence on all ranks."""
        for kind, named in (("parameter", self.module.named_parameters()), ("buffer", self.module.named_buffers())):
            for name, tensor in named:
                if kind == "buffer" or self.has_whole_weights:
                    yield f"{kind} {name}", tensor.detach()

    def described_weights(self) -> dict[str, Any]:
        """The module's whole state_dict, of which only names, dtypes and shapes are meant; no collective."""
        return self.module.state_dict()

    def whole_weights(self) -> dict[str, Any] | None:
        """The module's state_dict; parameters that are cut are in host memory."""
        return self.module.state_dict()

    def own_weights(self, copy: nn.Module | None = None) -> dict[str, Any]:
        """The module's state_dict; with `copy` that of a copy of the module, such as averaged weights, cut alike."""
        return (self.module if copy is None else copy).state_dict()

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict of the module as it is on one process, which may have CutTensors with all pieces."""
        self.module.load_state_dict(whole_tensors(state))

    @abstractmethod
    def whole_state(self) -> dict[str, Any] | None:
        """The optimizer's state_dict; in host memory where it is cut."""

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """The optimizer's state_dict."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict of the optimizer as it is on one process, which may have CutTensors with all pieces."""

    def close(self) -> None:  # noqa: B027
        """Let go of the optimizer; the module stays as it is."""


class OwnsAll(Ownership):
    """Of a process that has all weights and all of the optimizer's state."""

    def whole_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    own_state = whole_state

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().replicated()
        for name, parameter in self.module.named_parameters():
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"the optimizer's {entry} of {name}", value

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(whole_tensors(state))


class OwnsPart(Ownership):
    """Of one of the ranks of `process_group`, each of which owns a part of the parameters that are cut.

    `optimizer` must treat each element by itself: raises UserError (2) where it does not (see `require_elementwise`).
    """

    reduction: ExactReduction | PlainRounds
    """Sums the gradients, and gives those of this rank's part to what its optimizer updates."""
    updates: OwnUpdates
    """What the optimizer updates, and its state."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(module, optimizer)
        require_elementwise(optimizer)
        is_alone = process_group is None or process_group.size() == 1
        self.group = None if is_alone else process_group
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    @property
    def idle_passes(self) -> int:
        """How many passes this rank has to run in this step after those of its micro-batches: one or none."""
        return 0

    def idle_pass(self) -> contextlib.AbstractContextManager[None]:
        """Run forward and backward of any micro-batch inside; its gradients do not count."""
        return contextlib.nullcontext()

    def whole_state(self) -> dict[str, Any] | None:
        return whole_on_first(self.own_state(), self.group, self.device)

    def own_state(self) -> dict[str, Any]:
        return self.updates.own_state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.updates.load_whole_state(state)


def whole_on_first(
    state: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, Any] | None:
    """A state with a whole tensor, in host memory, for each CutTensor: on rank 0 of `group`, and None on the others.

    A collective; one tensor is gathered at a time, on `device`. Every rank has CutTensors for the same tensors.
    """
    cuts: dict[int, CutTensor] = {}
    replaced(state, lambda leaf, _: cuts.setdefault(id(leaf), leaf) if isinstance(leaf, CutTensor) else leaf)
    ranges = [[(start, values.numel()) for start, values in cut.pieces.items()] for cut in cuts.values()]
    everyones = [ranges]
    if group is not None:
        everyones *= group.size()
        dist.all_gather_object(everyones, ranges, group=group)
    wholes: dict[int, Tensor] = {}
    for (key, cut), *of_ranks in zip(cuts.items(), *everyones, strict=True):
        flat = torch.cat([torch.empty(0, dtype=cut.dtype, device=device), *cut.pieces.values()])
        parts = _gathered(flat, max(_length(pieces) for pieces in of_ranks), group)
        if parts is not None:
            like = torch.empty_strided(cut.shape, cut.strides, device="meta")
            wholes[key] = view_in(torch.empty(like.numel(), dtype=cut.dtype), like)
            whole = in_memory_order(wholes[key], like)
            for part, pieces in zip(parts, of_ranks, strict=True):
                begins = [0, *itertools.accumulate(count for _, count in pieces)]
                for (start, count), begin in zip(pieces, begins, strict=False):
                    whole[start : start + count] = part[begin : begin + count]
    if group is not None and group.rank():
        return None
    return replaced(state, lambda leaf, _: wholes[id(leaf)] if isinstance(leaf, CutTensor) else leaf)  # type: ignore[no-any-return]


def _gathered(flat: Tensor, longest: int, group: dist.ProcessGroup | None) -> list[Tensor] | None:
    """All ranks' flat tensors, each filled up to `longest` elements, on rank 0; None on the others."""
    if group is None:
        return [flat]
    filled = flat.new_zeros(longest)
    filled[: flat.numel()] = flat
    parts = [torch.empty_like(filled) for _ in range(group.size())] if group.rank() == 0 else None
    if longest:
        dist.gather(filled, parts, group=group, group_dst=0)
    return parts


def _length(pieces: Sequence[tuple[int, int]]) -> int:
    return sum(count for _, count in pieces)
