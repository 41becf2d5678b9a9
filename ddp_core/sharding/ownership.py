"""What this process owns of weights and optimizer state, and the whole of them, as one process has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.base.digests import named_tensors
from ddp_core.checkpoint import whole_tensors
from ddp_core.checkpoint.state import load_optimizer, with_queues, without_queues


@dataclass(eq=False)
class Ownership:
    """What this process owns of the state of `module` and `optimizer`, which stay the same objects: here, all of it.

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
        # All ranks have the state of whole parameters. That of cut ones is not found here: the optimizer keeps it for
        # the tensors that stand in their place, and each rank has another part of it.
        for name, parameter in self.module.named_parameters():
            for entry, value in named_tensors(without_queues(self.optimizer.state.get(parameter, {}))):
                yield f"the optimizer's {entry} of {name}", value

    def forward_alone(self) -> contextlib.AbstractContextManager[None]:
        """Run a forward without a backward inside. Raises DependsOnLayout where what it writes to weights is lost."""
        return contextlib.nullcontext()

    def forwards_done(self) -> None:
        """Let the module have the parameters that are trained; called after forwards without a backward."""

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

    def whole_on_first(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """A state with CutTensors as one process has it, in host memory; None on all ranks but the first."""
        return state

    def whole_state(self) -> dict[str, Any] | None:
        """The optimizer's state_dict; in host memory where it is cut."""
        return self.whole_on_first(self.own_state())

    def own_state(self) -> dict[str, Any]:
        """The optimizer's state_dict."""
        state: dict[str, Any] = without_queues(self.optimizer.state_dict())
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict of the optimizer as it is on one process, which may have CutTensors with all pieces."""
        load_optimizer(self.optimizer, with_queues(whole_tensors(state)))

    def close(self) -> None:
        """Let go of the optimizer; the module stays as it is."""
