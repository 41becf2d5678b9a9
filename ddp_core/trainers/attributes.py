"""What optimizer, schedule, layers and callbacks keep in plain attributes, which no checkpoint holds by itself.

A look, not a proof: a value in a closure, in a global variable or deep within an object is not seen, and an attribute
that changes may be harmless. Whether a resume loses something, the rehearsal says (`rehearsal.py`).
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ddp_core.base.digests import checksum
from ddp_core.base.user_code import user_code
from ddp_core.observe.callback import Callback

if TYPE_CHECKING:
    from ddp_core.trainers.train_state import TrainState

_Thing = TypeVar("_Thing")

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_COLLECTIONS = (list, tuple, deque, set, frozenset)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_MOST_ENTRIES, _MOST_ELEMENTS = 1000, 2**20
"""Of a collection and of a tensor; larger ones are not looked into."""

_TORCHS = {
    *vars(nn.Module()),
    *("state", "param_groups", "defaults", "_opt_called", "_warned_capturable_if_run_uncaptured", "found_inf"),
    *("grad_scale", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
}
"""Attributes that torch keeps itself: a checkpoint holds them, or nothing depends on them."""


def attributes_of(state: TrainState) -> dict[str, str]:
    """The plain attributes of optimizer, schedule and layers, by names that a message can tell; values as texts."""
    found: dict[str, str] = {}
    for owner, thing in _owners(state):
        found |= {f"{owner}{name}": text for name, text in plain_attributes(thing)}
    return found


class Attributes:
    """The plain attributes of optimizer, schedule, layers and callbacks as they were when this was made."""

    def __init__(self, state: TrainState, callbacks: Iterable[Callback]) -> None:
        self._state, self._callbacks = state, list(callbacks)
        self._before = attributes_of(state)
        self._of_callbacks = [dict(plain_attributes(callback)) for callback in self._callbacks]
        self._values = {owner: _values(thing) for owner, thing in _readable(state)}

    def changed(self) -> dict[str, str]:
        """Those that are others by now, with their values."""
        return {name: text for name, text in attributes_of(self._state).items() if self._before.get(name) != text}

    def lost(self) -> dict[str, str]:
        """Those of `changed` that state_dict and load_state_dict do not carry over, as far as a try shows it.

        The try is made with copies that have no state for any parameter.
        """
        lost = self.changed()
        for owner, thing in _readable(self._state):
            if any(name.startswith(owner) for name in lost):
                for name, text in plain_attributes(_read_again(thing, self._values[owner])):
                    if lost.get(f"{owner}{name}") == text:
                        del lost[f"{owner}{name}"]
        return lost

    def kept_by_callbacks(self) -> Iterator[tuple[Callback, str]]:
        """Callbacks that have changed an attribute and have no state_dict of their own, each with the first name."""
        for callback, before in zip(self._callbacks, self._of_callbacks, strict=True):
            changed = (name for name, text in plain_attributes(callback) if before.get(name) != text)
            first = next(changed, None)
            if first is not None and type(callback).state_dict is Callback.state_dict:
                yield callback, first


def _owners(state: TrainState) -> Iterator[tuple[str, Any]]:
    """What may keep attributes, beside classes of torch, which keep in their states what counts."""
    yield from _readable(state)
    for path, layer in state.model.named_modules():
        if not _is_torchs(layer) and type(layer).get_extra_state is nn.Module.get_extra_state:
            yield f"the model's attribute {path}{'.' if path else ''}", layer


def _readable(state: TrainState) -> Iterator[tuple[str, Any]]:
    """Optimizer and schedule, where these are no classes of torch: each is read back from its own state_dict."""
    if not _is_torchs(state.optimizer):
        yield "the optimizer's attribute ", state.optimizer
    if state.schedule is not None and not _is_torchs(state.schedule):
        yield "the schedule's attribute ", state.schedule


def _is_torchs(thing: object) -> bool:
    # Not the class alone: `fully_shard` makes one of torch's from the user's and its own.
    return all(kind.__module__.partition(".")[0] in ("torch", "builtins") for kind in type(thing).__mro__)


def plain_attributes(thing: object, besides: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Names of plain attributes and texts that tell their values from others, without torch's and those `besides`."""
    for name, value in [*getattr(thing, "__dict__", {}).items()]:
        if name not in _TORCHS and name not in besides and (text := _text(value)) is not None:
            yield name, text


def _text(value: Any, inside: bool = False) -> str | None:
    """A text that tells the value from others; None for what is no plain value. Calls nothing of the user's."""
    kind = type(value)
    if kind in _NUMBERS or isinstance(value, np.number):
        return repr(value)
    if kind is Tensor:
        return _text_of_tensor(value)
    if inside:
        return None
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return (
            _digest("an array", [str(value.dtype), value.shape, value.tobytes()])
            if value.size <= _MOST_ELEMENTS
            else None
        )
    if kind is random.Random:
        return _digest("a generator", value.getstate())
    if kind is np.random.RandomState:
        return _digest("a generator", [str(part.tolist()) for part in map(np.asarray, value.get_state())])
    if kind is np.random.Generator:
        return _digest("a generator", value.bit_generator.state)
    if kind is torch.Generator:
        return _digest("a generator", value.get_state().tolist())
    if kind in (*_COLLECTIONS, *_MAPPINGS):
        return _text_of_many(value)
    return None


def _text_of_tensor(value: Tensor) -> str | None:
    # What carries a history is made anew in each forward: a second backward through it would fail.
    if value.requires_grad or value.layout is not torch.strided or value.numel() > _MOST_ELEMENTS or value.is_meta:
        return None
    if not value.numel():
        return f"an empty tensor {list(value.shape)}"
    return repr(value.item()) if value.numel() == 1 else f"a tensor ({checksum(value)})"


def _text_of_many(value: Any) -> str | None:
    if len(value) > _MOST_ENTRIES:
        return f"{len(value)} entries"
    parts = [*value, *(value.values() if isinstance(value, Mapping) else ())]
    texts = [_text(part, inside=True) for part in parts]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    return f"{type(value).__name__}[{', '.join(sorted(known) if isinstance(value, set | frozenset) else known)}]"


def _digest(what: str, state: Any) -> str:
    return f"{what} ({hashlib.sha256(repr(state).encode()).hexdigest()[:16]})"


def _values(thing: object) -> dict[str, Any]:
    """Copies of the plain attributes."""
    return {name: _copied(value) for name, value in vars(thing).items() if _text(value) is not None}


def _copied(value: Any) -> Any:
    """A value that changes no more, where it is a plain one; the entries of collections are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return deepcopy(value)  # a shallow copy would draw from the same numbers
    return copy(value)


def _read_again(thing: Any, values: Mapping[str, Any]) -> Any:
    """A copy of an optimizer or a schedule that has these values, and then loads the state_dict of `thing`.

    An object without attributes where that raises.
    """
    try:
        with user_code("the state_dict of your optimizer or schedule"):
            source, reader = _apart(thing), _apart(thing)
            vars(reader).update({name: _copied(value) for name, value in values.items()})
            reader.load_state_dict(source.state_dict())
    except Exception:
        return object()
    return reader


def _apart(thing: _Thing) -> _Thing:
    """A copy that shares no plain value with `thing`, and whose optimizer has no state for any parameter."""
    clone: Any = object.__new__(type(thing))
    vars(clone).update({name: _copied(value) if _text(value) else value for name, value in vars(thing).items()})
    if isinstance(thing, torch.optim.Optimizer):
        clone.state, clone.param_groups = defaultdict(dict), [dict(group) for group in thing.param_groups]
    elif hasattr(thing, "optimizer"):
        clone.optimizer = _apart(thing.optimizer)
    return clone  # type: ignore[no-any-return]
