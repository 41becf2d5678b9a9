"""An optimizer that updates, on each rank, what this rank owns of the parameters, and keeps the state of that alone.

It must treat each element of a parameter by itself. Torch's own optimizers that do are listed. One's own says so by
`elementwise = True` on its class, and the rehearsal before a run proves it by the bits of whole parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, optim

from ddp_core.base.digests import same_bits
from ddp_core.base.errors import UserError
from ddp_core.checkpoint import CutTensor
from ddp_core.checkpoint.state import leaves, load_optimizer, replaced, with_queues, without_queues
from ddp_core.reduction.agreement import gathered

from .owned import Owned

_MISSING = object()
_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.device
_ELEMENTWISE = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""With all of their options, as fused kernels, for many parameters at once, and in a loop."""
_REASONS: Mapping[type[optim.Optimizer], str] = {
    optim.Adafactor: "it divides by norms of rows, columns and the whole of a parameter",
    optim.LBFGS: "it multiplies the gradients of all parameters with each other, in several passes of a step",
    optim.Muon: "it makes each matrix orthogonal, for which it multiplies the matrix with itself",
    optim.SparseAdam: "it takes sparse gradients alone, and those of shards are dense",
}


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError (2) for an optimizer that needs more of a parameter than the element that it updates.

    A class that is derived from one of torch's has a rule of its own, so it must say what its rule is.
    """
    kind = type(optimizer)
    for known, reason in _REASONS.items():
        if issubclass(kind, known):
            raise UserError(
                f"{kind.__name__} does not treat each element by itself: {reason}; leave --shard out, or use SGD, "
                "Adam, AdamW, RMSprop, Adagrad and their like"
            )
    if kind not in _ELEMENTWISE and getattr(kind, "elementwise", False) is not True:
        raise UserError(
            f"{kind.__name__} does not say that it updates each element by itself, as --shard needs: where no "
            "element's update reads another one or a random number, write elementwise = True into its class (a "
            "rehearsal proves it); else leave --shard out"
        )


class _Cut(NamedTuple):
    """Stands for a tensor of which each rank has its part."""

    dtype: torch.dtype


class OwnUpdates:
    """Lets `optimizer` update the tensors of `owned` in the place of whole parameters, given by these' ids.

    The optimizer stays the same object: schedules, `zero_grad` and scalers go on to work. A parameter that is not in
    `owned` stays in its group, and what state the optimizer has is cut. The optimizer's own `state_dict` is of this
    rank's tensors alone.

    For fp16 use ShardedGradScaler of torch.distributed.fsdp.sharded_grad_scaler, which skips a step on all ranks where
    the gradients of any overflow.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, owned: Mapping[int, Owned], group: dist.ProcessGroup | None
    ) -> None:
        self._optimizer, self._group = optimizer, group
        state = optimizer.state_dict()
        self._members: list[list[Owned | Tensor]] = [
            [owned.get(id(parameter), parameter) for parameter in group["params"]] for group in optimizer.param_groups
        ]
        """The parameters of each group, in the sequence in which a whole state_dict numbers them."""
        own = [[each.name if isinstance(each, Owned) else "" for each in members] for members in self._members]
        everyones = gathered(own, self._group)
        for rank, theirs in enumerate(everyones):
            if theirs != everyones[0]:
                raise UserError(
                    f"rank {rank} has the parameters of its optimizer's groups in another sequence than rank 0, so "
                    "a state would go to other parameters: make the groups from lists, since a set has no sequence"
                )
        for group_of_optimizer, members in zip(optimizer.param_groups, self._members, strict=True):
            group_of_optimizer["params"] = [tensor for member in members if (tensor := _updated(member)) is not None]
        optimizer.state.clear()
        if state["state"]:
            self.load_whole_state(state)

    def own_state(self) -> dict[str, Any]:
        """The state_dict of the optimizer over whole parameters, with a CutTensor for each tensor that is cut.

        A collective that sends no such tensor: a rank that owns nothing of a parameter hears of its state from others.
        Raises UserError (2) on every rank where the ranks have unlike values of what is not cut.
        """
        own: dict[str, Any] = without_queues(self._optimizer.state_dict())
        states = {key: value for key, value in own["state"].items() if not isinstance(key, int)}
        entries, numbers = self._entries_of_all_ranks(), itertools.count()
        for group, members in zip(own["param_groups"], self._members, strict=True):
            group["params"] = [next(numbers) for _ in members]
            for number, member in zip(group["params"], members, strict=True):
                if number in entries:
                    states[number] = self._cut_tensors(member, entries[number])
        return {**own, "state": states}

    def load_whole_state(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state_dict of the optimizer over whole parameters; every rank has all of it."""
        lengths = [len(group["params"]) for group in state["param_groups"]]
        if lengths != (here := list(map(len, self._members))):
            raise ValueError(f"the state has {lengths} parameters in its groups, but the optimizer has {here}")
        state = without_queues(state)
        states = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
        groups, numbers = [], itertools.count()
        for group, members in zip(state["param_groups"], self._members, strict=True):
            kept = []
            for saved, member in zip(group["params"], members, strict=True):
                if _updated(member) is None:
                    continue
                kept.append(next(numbers))
                if saved in state["state"]:
                    states[kept[-1]] = _own_part(state["state"][saved], member)
            groups.append({**group, "params": kept})
        load_optimizer(self._optimizer, with_queues({**state, "state": states, "param_groups": groups}))

    def _entries_of_all_ranks(self) -> dict[int, dict[str, Any]]:
        """By the parameter's number in a whole state_dict: its entries, with a _Cut for each tensor that is cut."""
        own: dict[int, dict[str, Any]] = {}
        for number, member in enumerate(itertools.chain.from_iterable(self._members)):
            tensor = _updated(member)
            if tensor is None or (isinstance(member, Owned) and tensor.numel() == 0 < member.like.numel()):
                continue  # what is kept of no element tells nothing of the others
            if state := without_queues(self._optimizer.state.get(tensor)):
                own[number] = _described(state, tensor if isinstance(member, Owned) else None)
        together: dict[int, dict[str, Any]] = {}
        for theirs in gathered(own, self._group):
            for number, entries in theirs.items():
                known = together.setdefault(number, entries)
                if (name := _unlike(leaves(known), leaves(entries))) is not None:
                    raise self._refusal(number, name)
        return together

    def _refusal(self, number: int, name: str) -> UserError:
        """The error for an entry that no rank has cut: one rank's value would be saved, wrong for the others."""
        member = list(itertools.chain.from_iterable(self._members))[number]
        shape = list(member.like.shape if isinstance(member, Owned) else member.shape)
        kind = type(self._optimizer).__name__
        return UserError(
            f"{kind} does not treat each element by itself: {name} of a weight of shape {shape} is another on each "
            "rank, and is not cut as the weight is; without shards (--shard none) it can be used"
        )

    def _cut_tensors(self, member: Owned | Tensor, entries: dict[str, Any]) -> Any:
        """What all ranks have of a parameter, with its CutTensors."""
        if not isinstance(member, Owned):
            return entries
        states: Mapping[Any, Any] = self._optimizer.state
        own = leaves(without_queues(states.get(member.tensor, {})))

        def cut(leaf: Any, name: str) -> Any:
            if not isinstance(leaf, _Cut):
                return leaf
            values = own[name].reshape(-1)[member.inside] if name in own else None
            return member.cut_tensor(values, leaf.dtype)

        return replaced(entries, cut)


def _updated(member: Owned | Tensor) -> Tensor | None:
    """What the optimizer has in its groups for a parameter; None where this rank owns nothing of it."""
    return member.tensor if isinstance(member, Owned) else member


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The name of an entry that is not the same in both; None without one. A save refuses what is no plain value."""
    for name in sorted(one.keys() | other.keys()):
        here, there = one.get(name, _MISSING), other.get(name, _MISSING)
        if isinstance(here, Tensor) and isinstance(there, Tensor):
            if not same_bits(here, there):
                return name
        # By their texts, since NaN equals nothing.
        elif type(here) is not type(there) or (isinstance(here, _PLAIN) and repr(here) != repr(there)):
            return name
    return None


def _described(state: Mapping[str, Any], cut: Tensor | None) -> Any:
    """The state of a parameter in host memory, without the tensors that are cut as the one given is."""

    def described(value: Any, _: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _Cut(value.dtype) if cut is not None and value.shape == cut.shape else value.detach().clone().cpu()

    return replaced(state, described)


def _own_part(state: Mapping[str, Any], member: Owned | Tensor) -> Any:
    """This rank's part of the state of a parameter; never memory that something else uses."""

    def part(value: Any, _: str) -> Any:
        if not isinstance(value, Tensor | CutTensor):
            return value
        if isinstance(member, Tensor) or tuple(value.shape) != tuple(member.like.shape):
            return value.clone() if isinstance(value, Tensor) else value.whole()
        return member.filled(member.of_whole(value)).clone()

    return replaced(state, part)
