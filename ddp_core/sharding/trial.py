"""A copy of an optimizer that updates other tensors than the optimizer does, and leaves the optimizer as it is."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_core.base.user_code import user_code
from ddp_core.checkpoint.queues import without_queues
from ddp_core.checkpoint.state import leaves, replaced


class Trial:
    """A copy of `optimizer` whose parameter groups have other parameters; its steps call no hooks.

    `groups` has the new parameters, a list for each group, and `instead` what stands for each parameter of the
    optimizer wherever else it refers to one: by the parameter's id. Everything that the copy changes is its own, and
    what has two names in the optimizer (a wrapper's groups, which are those of the optimizer inside) has two names in
    the copy. `of` names the parameter of the optimizer whose state a new parameter begins with: by the new one's id.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[list[nn.Parameter]],
        instead: Mapping[int, Tensor],
        of: Mapping[int, Tensor],
    ) -> None:
        self.optimizer: torch.optim.Optimizer = object.__new__(type(optimizer))
        self.groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        state: Any = defaultdict(dict)
        copies: dict[int, Any] = {
            **instead,
            id(optimizer): self.optimizer,
            id(optimizer.param_groups): self.groups,
            id(optimizer.state): state,
            **{id(group): own for group, own in zip(optimizer.param_groups, self.groups, strict=True)},
        }
        for group, own, parameters in zip(optimizer.param_groups, self.groups, groups, strict=True):
            own.update({name: _copied(value, copies) for name, value in group.items()})
            own["params"] = list(parameters)
        others: dict[Any, Any] = dict(optimizer.state)
        for key, value in others.items():
            if not isinstance(key, Tensor):
                state[key] = _copied(value, copies)
        # Some optimizers make their state when they are made.
        cut = _cut_entries(optimizer)
        for parameter in (each for parameters in groups for each in parameters):
            like = of[id(parameter)]

            def begun(value: Any, name: str, parameter: Tensor = parameter, like: Tensor = like) -> Any:
                is_cut = name in cut and value.shape == like.shape
                return _resized(value, parameter) if is_cut else _copied(value, copies)

            if like in optimizer.state:
                state[parameter] = replaced(optimizer.state[like], begun)
        for name, value in vars(optimizer).items():
            is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
            setattr(self.optimizer, name, OrderedDict() if is_hooks else _copied(value, copies))
        self.optimizer.param_groups, self.optimizer.state = self.groups, state
        self._step = _step_of(optimizer)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, whose gradients are set."""
        with user_code("your optimizer"):
            self._step(self.optimizer)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """What the state holds for a parameter, by dotted names."""
        return leaves(without_queues(self.optimizer.state.get(parameter, {})))

    def drawn_from(self) -> list[bytes]:
        """The states of all generators of random numbers that a step can reach: equal where none was drawn from."""
        states: list[Any] = [random.getstate(), np.random.get_state(), torch.random.get_rng_state()]
        devices = {each.device for group in self.groups for each in group["params"] if each.device.type == "cuda"}
        states += [torch.cuda.get_rng_state(device) for device in sorted(devices, key=str)]
        for value in self._values():
            if isinstance(value, random.Random):
                states.append(value.getstate())
            elif isinstance(value, np.random.Generator):
                states.append(value.bit_generator.state)
            elif isinstance(value, np.random.RandomState | torch.Generator):
                states.append(value.get_state())
        return [bytes(each.numpy()) if isinstance(each, Tensor) else pickle.dumps(each) for each in states]

    def _values(self) -> Iterator[Any]:
        yield from vars(self.optimizer).values()
        for group in self.groups:
            yield from group.values()


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The optimizer's `step`, to be called with a copy, without what torch wraps around it to call hooks."""
    step: Any = optimizer.step
    if not inspect.ismethod(step):
        # A schedule of torch puts a function around the method's own, and this one knows the optimizer itself.
        if not hasattr(step, "__wrapped__"):
            raise TypeError("its step is a function in the place of the method, which knows no copy")
        step = step.__wrapped__
    function: Any = getattr(step, "__func__", step)
    return function.__wrapped__ if hasattr(function, "hooked") else function  # type: ignore[no-any-return]


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of a value, in which `copies` stands for what is known; the value itself where it cannot be copied."""
    try:
        return copy.deepcopy(value, copies)
    except Exception:
        return value


def _cut_entries(optimizer: torch.optim.Optimizer) -> set[str]:
    """The dotted names of what has its parameter's shape in the state; a single number says nothing."""
    return {
        name
        for key, state in optimizer.state.items()
        if isinstance(key, Tensor) and key.dim()
        for name, value in leaves(state).items()
        if isinstance(value, Tensor) and value.shape == key.shape
    }


def _resized(value: Tensor, parameter: Tensor) -> Tensor:
    """A value of a state for `parameter`: every element as the first one was."""
    filled = torch.empty_like(parameter, dtype=value.dtype)
    return filled.fill_(value.flatten()[0]) if value.numel() else filled
