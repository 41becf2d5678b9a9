"""Queues (`collections.deque`) in a state, in the form of dicts, and optimizers that load them.

`torch.load(weights_only=True)` reads no queue, and no number of NumPy's or of an IntEnum: these become plain numbers.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from .state import replaced

_ITEMS, _LONGEST = "items of a deque", "maxlen"


def without_queues(state: Any) -> Any:
    """The state with a dict of its items in the place of each queue, and with plain numbers."""

    def as_dict(leaf: Any, _: str) -> Any:
        if isinstance(leaf, np.number):
            return leaf.item()
        if isinstance(leaf, IntEnum):
            return int(leaf)
        if not isinstance(leaf, deque):
            return leaf
        return {_ITEMS: [without_queues(item) for item in leaf], _LONGEST: leaf.maxlen}

    return replaced(state, as_dict)


def with_queues(state: Any) -> Any:
    """The state that `without_queues` was given; whatever has no queue in it is the same object."""
    if isinstance(state, Mapping):
        if state.keys() == {_ITEMS, _LONGEST}:
            return deque((with_queues(item) for item in state[_ITEMS]), state[_LONGEST])
        found = {key: with_queues(value) for key, value in state.items()}
        return found if any(found[key] is not state[key] for key in found) else state
    if type(state) in (list, tuple):
        items = [with_queues(item) for item in state]
        return type(state)(items) if any(map(operator.is_not, items, state)) else state
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state_dict, also what torch's `load_state_dict` loses of it.

    That makes every sequence anew from its items: a queue forgets how long it may become, and a text becomes that of a
    generator.
    """
    optimizer.load_state_dict(dict(state))
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            if number in state["state"]:
                _mended(optimizer.state[parameter], state["state"][number])


def _mended(loaded: Any, state: Any) -> Any:
    if isinstance(state, str):
        return state
    if isinstance(state, deque) and isinstance(loaded, deque):
        return deque(map(_mended, loaded, state), state.maxlen)
    if isinstance(state, Mapping) and isinstance(loaded, dict):
        loaded.update({key: _mended(value, state[key]) for key, value in loaded.items() if key in state})
    elif type(state) in (list, tuple) and type(loaded) is type(state):
        return type(state)(map(_mended, loaded, state))
    return loaded
