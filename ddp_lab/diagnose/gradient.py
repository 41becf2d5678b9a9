"""Whether the ranks step with the gradient of what they compute together, also through what they exchange in forward.

One process makes the forward passes of all ranks again, with autograd. What ranks exchange in them is a part of its
graph, so its gradient of the sum of their losses is that of one process with all of their samples. Ranks may step with
this sum or, as DDP does, with the mean. Another gradient is their fault only if autograd has been followed: then the
same operations, with the exchanges as constants, must give the gradient that each rank had of its own samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_lab.diagnose.across import multiple
from ddp_lab.diagnose.again import APART, Made, exchange, leaves
from ddp_lab.diagnose.checks import CLEAR
from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.recorder import some_elements
from ddp_lab.diagnose.tape import (
    Backward,
    Content,
    Entry,
    Exchange,
    Mode,
    Operation,
    Place,
    StepBegins,
    StepMade,
    Whole,
)
from ddp_lab.diagnose.trace import Run


def left_out(run: Run, tapes: Sequence[list[Entry]]) -> Finding | None:
    """The finding that the first step's gradient is not that of one process with all samples; None where it is.

    Raises UserError where neither can be proved.
    """
    exchanges = [each for each in tapes[0] if isinstance(each, Exchange) and each.mode is Mode.SEEN]
    if not exchanges:
        return None
    steps = next(run.by_step())
    scale = float((steps[0].event["scaler"] or {}).get("scale", 1.0))
    used = {name: each["reduced"] for name, each in steps[0].gradients.items()}
    factors = {
        name: factor and factor * scale * run.world
        for name, factor in _factors(used, _gradients(tapes, is_one_process=True)[0]).items()
    }
    if any(_are_all(expected, factors.values()) for expected in (1, run.world)):
        return None
    for step, gradients in zip(steps, _gradients(tapes, is_one_process=False), strict=True):
        owns = {name: each["own"] for name, each in step.gradients.items()}
        if not _are_all(1, _factors(owns, gradients).values()):
            raise UserError(
                "not proved: autograd does not make the ranks' gradients of the operations of their forward"
            )
    name, factor = next((name, each) for name, each in factors.items() if not _are_all(1, [each]))
    how = "no multiple of" if factor is None else f"{factor:.3g} times"
    evidence = (
        f"step 1: the gradient of {name} is {how} what one process makes of the samples of {run.world} ranks; autograd "
        "has not seen what ranks exchange in forward"
    )
    return Finding("exchange-without-gradient", evidence, run.world, exchanges[0].site)


def _forward(entries: Sequence[Entry]) -> Sequence[Entry]:
    """What comes before the first optimizer step."""
    end = next((at for at, each in enumerate(entries) if isinstance(each, StepBegins)), None)
    if end is None or not any(isinstance(each, Backward) for each in entries[:end]):
        raise UserError("not proved: its first step has no backward pass before it")
    return entries[:end]


def _are_all(expected: float, factors: Iterable[float | None]) -> bool:
    return all(each is not None and abs(each / expected - 1) < CLEAR for each in factors)


def _factors(seen: Mapping[str, list[float] | None], made: Mapping[str, Tensor]) -> dict[str, float | None]:
    """By parameter, the multiple of the gradient made here that was seen; None for one that is no multiple."""
    factors: dict[str, float | None] = {}
    for name, gradient in made.items():
        if (elements := seen.get(name)) is None:
            continue
        if any(here := some_elements(gradient).tolist()) or any(elements):
            factors[name] = multiple(here, elements) if any(here) else None
    return factors


def _gradients(tapes: Sequence[list[Entry]], is_one_process: bool) -> list[dict[str, Tensor]]:
    """By rank and parameter, the gradient of the losses up to the first step: of all ranks', or of the rank's own one.

    Raises UserError where ranks do not meet at the same exchange.
    """
    graphs = [_Graph(entries, is_one_process) for entries in tapes]
    runs = [graph.run() for graph in graphs]
    while any(at := [next(each, None) for each in runs]):
        meeting = [each for each in at if each is not None]
        if len(meeting) < len(graphs):
            raise UserError(APART)
        with torch.set_grad_enabled(meeting[0].mode is Mode.SEEN):
            exchange(meeting, graphs)
    if not is_one_process:
        return [graph.gradients(graph.losses) for graph in graphs]
    # One of the ranks' copies of the weights is enough to be asked for: the sum is over all of them.
    losses = [loss for graph in graphs for loss in graph.losses]
    every = [graph.gradients(losses) for graph in graphs]
    return [{name: sum((each[name] for each in every), torch.zeros(())) for name in every[0]}]


class _Graph(Made):
    """The forward passes of one rank, made again with autograd."""

    def __init__(self, entries: Sequence[Entry], is_one_process: bool) -> None:
        super().__init__()
        self._entries = _forward(entries)
        self._weights = next(each for each in entries if isinstance(each, StepMade)).places
        self._leaves = {place.tensor: name for name, place in self._weights.items()}
        self._is_one_process = is_one_process
        self._tensors: dict[int, Tensor] = {}
        self.losses: list[Tensor] = []

    def run(self) -> Iterator[Exchange]:
        """Make the operations, up to the next exchange."""
        for entry in self._entries:
            if isinstance(entry, Content):
                if entry.exchange is None or not self._is_one_process:  # else this process has made it itself
                    self.fill(entry)
            elif isinstance(entry, Operation) and entry.mode is not Mode.BACKWARD:
                self._make(entry)
            elif isinstance(entry, Exchange) and entry.mode is not Mode.BACKWARD and self._is_one_process:
                with torch.set_grad_enabled(entry.mode is Mode.SEEN):
                    self.give(entry)
                yield entry
            elif isinstance(entry, Backward):
                self._backward(entry)

    def at(self, place: Place) -> Tensor:
        """The tensor at a place; a new one for an alias that no operation has made."""
        if (known := self._tensors.get(place.tensor)) is not None:
            return known
        self._tensors[place.tensor] = made = super().at(place).requires_grad_(place.tensor in self._leaves)
        return made

    def gradients(self, losses: Sequence[Tensor]) -> dict[str, Tensor]:
        """By weight, the gradient of the sum of losses."""
        names = [name for number, name in self._leaves.items() if number in self._tensors]
        weights = [self._tensors[self._weights[name].tensor] for name in names]
        found = torch.autograd.grad(losses, weights, retain_graph=True, allow_unused=True)
        return {name: each for name, each in zip(names, found, strict=True) if each is not None}

    def _make(self, entry: Operation) -> None:
        places = [each for each in leaves([entry.given]) if isinstance(each, Place | Whole)]
        # What works with what a backward pass has left is not made here.
        if all(each.storage in self.storages for each in places):
            for place, made in self.make(entry, with_graph=entry.mode is Mode.SEEN):
                self._tensors[place.tensor] = made

    def _backward(self, entry: Backward) -> None:
        for place, gradient in zip(entry.roots, entry.gradients, strict=True):
            root = self.at(place)
            if not root.requires_grad:
                raise UserError("not proved: a loss of its does not come from the operations that were seen")
            self.losses.append((root if gradient is None else root * self.at(gradient)).sum())
