"""An optimizer of which each rank updates its own pieces of the parameters, and keeps the state of these alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.checkpoint import CutTensor
from ddp_core.reduction import ExactReduction, Piece
from ddp_core.reduction.flat import in_memory_order

from .elementwise import per_element, require_elementwise


class ShardedOptimizer:
    """Lets `optimizer` update this rank's pieces of the parameters; every `optimizer.step()` then gathers the whole.

    `optimizer` is any torch optimizer over the parameters of a module, and `reduction` an `ExactReduction` of this
    module with shards:

        shards = Shards.of(model, world_size)
        optimizer = torch.optim.AdamW(model.parameters())
        reduction = ExactReduction(model, 8, process_group=group, shards=shards)
        sharded = ShardedOptimizer(optimizer, reduction)

    The same on every rank. The optimizer stays the same object: schedules, `zero_grad` and scalers go on to work. Its
    groups hold pieces in the place of parameters (and frozen parameters as before), and what state it has is cut. Do
    not save its own `state_dict`, which is that of this rank's pieces. For fp16 use ShardedGradScaler of
    torch.distributed.fsdp.sharded_grad_scaler, which skips a step on all ranks where the gradients of any overflow.

    Raises UserError (2) for an optimizer that does not treat each element by itself (see `require_elementwise`), and
    ValueError for a reduction without shards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reduction: ExactReduction) -> None:
        if reduction.shards is None:
            raise ValueError("this reduction has no shards: construct ExactReduction with shards=Shards.of(module, W)")
        require_elementwise(optimizer)
        self._optimizer, self._reduction, self._shards = optimizer, reduction, reduction.shards
        self._position = {id(parameter): number for number, parameter in enumerate(self._shards.parameters)}
        self._own: dict[int, list[Piece]] = {position: [] for position in self._position.values()}
        for piece in self._shards.pieces(reduction.rank):
            self._own[piece.position].append(piece)
        self._parameters: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        """Of each parameter group, as they were; in this sequence a state_dict numbers them."""
        self._per_element = [per_element(optimizer, group) for group in optimizer.param_groups]
        state = optimizer.state_dict()
        for group, parameters in zip(optimizer.param_groups, self._parameters, strict=True):
            group["params"] = [part for parameter in parameters for part in self._parts(parameter)]
        optimizer.state.clear()
        if state["state"]:
            self.load_whole_state(state)
        self._hook = optimizer.register_step_post_hook(lambda *_: reduction.gather_parameters())

    def whole_state(self) -> dict[str, Any] | None:
        """The state_dict that the optimizer would have without shards, on rank 0, in host memory; None on the others.

        A collective. Same keys and sequence as torch's; tensors have the shapes and strides of their parameters.
        """
        entries = self._entries_of_all_ranks()
        self._gather_tensors(entries)
        return self._state_dict(entries) if self._reduction.rank == 0 else None

    def own_state(self) -> dict[str, Any]:
        """The same on every rank, with a CutTensor of this rank's pieces for each tensor that is cut.

        A collective that moves no such tensor.
        """
        entries = self._entries_of_all_ranks()
        for position, state in entries.items():
            for name, value in state.items():
                if isinstance(value, torch.dtype):
                    values = {
                        piece: self._optimizer.state.get(piece.tensor, {}).get(name) for piece in self._own[position]
                    }
                    state[name] = self._cut_tensor(position, value, values)
        return self._state_dict(entries)

    def own_weights(self, module: nn.Module, copy: nn.Module | None = None) -> dict[str, Any]:
        """The state_dict of the module, with a CutTensor of this rank's pieces for each parameter that is cut.

        With `copy` that of a copy of the module, such as averaged weights, cut as the module is.
        """
        state: dict[str, Any] = (module if copy is None else copy).state_dict()
        cuts: dict[tuple[int, int], CutTensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            position, value = self._position.get(id(parameter)), state.get(name)
            if position is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            key = (position, value.data_ptr())  # tied parameters have one memory
            if key not in cuts:
                flat = in_memory_order(value, parameter)
                values = {piece: flat[piece.start : piece.stop] for piece in self._own[position]}
                cuts[key] = self._cut_tensor(position, value.dtype, values)
            state[name] = cuts[key]
        return state

    def load_whole_state(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state_dict of the optimizer without shards; every rank has all of it."""
        lengths = [len(group["params"]) for group in state["param_groups"]]
        if lengths != [len(parameters) for parameters in self._parameters]:
            raise ValueError(
                f"the state has {lengths} parameters in its groups, but the optimizer has "
                f"{[len(parameters) for parameters in self._parameters]}"
            )
        states = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
        groups, numbers = [], itertools.count()
        for group, parameters, names in zip(state["param_groups"], self._parameters, self._per_element, strict=True):
            kept = []
            for saved, parameter in zip(group["params"], parameters, strict=True):
                for part in self._ranges(parameter):
                    kept.append(next(numbers))
                    if saved in state["state"]:
                        states[kept[-1]] = {
                            name: _cut(value, parameter, part, name in names)
                            for name, value in state["state"][saved].items()
                        }
            groups.append({**group, "params": kept})
        self._optimizer.load_state_dict({**state, "state": states, "param_groups": groups})

    def close(self) -> None:
        """Gather no more after `optimizer.step()`."""
        self._hook.remove()

    def _cut_tensor(self, position: int, dtype: torch.dtype, values: Mapping[Piece, Tensor | None]) -> CutTensor:
        """Values for each element of a parameter, of which this rank has those of its pieces."""
        parameter = self._shards.parameters[position]
        pieces = {piece.start: value.detach() for piece, value in values.items() if value is not None}
        return CutTensor(dtype, tuple(parameter.shape), parameter.stride(), pieces)

    def _state_dict(self, entries: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """The optimizer's state_dict as it is without shards, with these states of the parameters that are cut."""
        own = self._optimizer.state_dict()
        numbers = itertools.count()
        states = {key: value for key, value in own["state"].items() if not isinstance(key, int)}
        for group, parameters in zip(own["param_groups"], self._parameters, strict=True):
            group["params"] = [next(numbers) for _ in parameters]
            for number, parameter in zip(group["params"], parameters, strict=True):
                position = self._position.get(id(parameter))
                state = self._optimizer.state.get(parameter, {}) if position is None else entries.get(position, {})
                if state:
                    states[number] = {name: _on_host(value) for name, value in state.items()}
        return {**own, "state": states}

    def _parts(self, parameter: Tensor) -> list[Tensor]:
        """What the optimizer gets in the place of a parameter: this rank's pieces, or a frozen one as it was."""
        position = self._position.get(id(parameter))
        return [parameter] if position is None else [piece.tensor for piece in self._own[position]]

    def _ranges(self, parameter: Tensor) -> list[slice | None]:
        """The elements of each of `_parts`; None for all of them in their own shape."""
        position = self._position.get(id(parameter))
        return [None] if position is None else [slice(piece.start, piece.stop) for piece in self._own[position]]

    def _entries_of_all_ranks(self) -> dict[int, dict[str, Any]]:
        """For each parameter with a state: its entries, of those with a number for each element only the dtype."""
        own: dict[int, dict[str, Any]] = {}
        for position, pieces in self._own.items():
            for piece in pieces:
                if state := self._optimizer.state.get(piece.tensor):
                    own[position] = {
                        name: value.dtype if _is_per_element(value, piece) else _on_host(value)
                        for name, value in state.items()
                    }
        group = self._reduction.process_group
        if group is None or group.size() == 1:
            return own
        everyones = [own] * group.size()
        dist.all_gather_object(everyones, own, group=group)
        return {position: entries for theirs in everyones for position, entries in sorted(theirs.items())}

    def _gather_tensors(self, entries: dict[int, dict[str, Any]]) -> None:
        """Put the tensors in the place of their dtypes, on rank 0; one flat tensor at a time."""
        for number, group in enumerate(self._shards.groups):
            wanted = {
                (name, value): None
                for position in group.positions
                for name, value in entries.get(position, {}).items()
                if isinstance(value, torch.dtype)
            }
            for name, dtype in wanted:
                flat = torch.empty_like(group.flat, dtype=dtype)
                for position in group.positions:
                    for piece in self._own[position]:
                        value = self._optimizer.state.get(piece.tensor, {}).get(name)
                        if _is_per_element(value, piece) and value.dtype == dtype:
                            flat[piece.place] = value
                self._reduction.gather({number: flat})
                if self._reduction.rank == 0:
                    for position, view in zip(group.positions, group.views(flat), strict=True):
                        if entries.get(position, {}).get(name) == dtype:
                            entries[position][name] = torch.empty_like(view, device="cpu").copy_(view)


def _is_per_element(value: Any, piece: Piece) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.tensor.shape


def _cut(value: Any, parameter: Tensor, part: slice | None, per_element: bool) -> Any:
    """A piece's part of a value in the state of a parameter; never memory that something else uses."""
    if not isinstance(value, Tensor):
        return value
    # A parameter without dimensions has the shape of a single number.
    if part is None or value.shape != parameter.shape or not (per_element or parameter.dim()):
        return value.clone()
    return in_memory_order(value, parameter)[part].clone()


def _on_host(value: Any) -> Any:
    """A value that has its own memory, in host memory where it is a tensor."""
    return value.detach().clone().cpu() if isinstance(value, Tensor) else value
