"""The state of a run, described and copied: dicts, lists and tuples, nested, of tensors and plain values."""

from __future__ import annotations

import operator
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.torch_internals import foreach_copy_, module_versions, set_module_versions

Shapes = dict[str, list[Any]]
"""Dotted name → [dtype without "torch.", list of sizes]."""

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})
_KEYS = frozenset({str, int, float})
_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class StateTensors:
    """The tensors of a state with their dotted names, found in one walk; makes the same state over other tensors.

    Raises TypeError, naming the key, for anything that `torch.load(weights_only=True)` could not read back as it was,
    and ValueError where two tensors share one dotted name.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.tensors: list[Tensor] = []
        """Every tensor of the state once, detached; tied tensors count as one."""
        self.shapes: Shapes = {}
        self._slots: list[int] = []
        """For each place of the state that holds a tensor: which of `tensors` it is."""
        self._slot_of: dict[tuple[Any, ...], int] = {}
        self._walk(state, "")

    def _walk(self, state: Any, name: str) -> None:
        if isinstance(state, Tensor):
            self._add(state, name)
        elif type(state) in _PLAIN:
            pass
        elif isinstance(state, Mapping):
            for key, value in state.items():
                if not _is_key(key):
                    kind = type(key).__name__
                    raise TypeError(
                        f"state[{name!r}] has a key {key!r} of type {kind}: use str, int, float, or a tuple of these"
                    )
                self._walk(value, f"{name}.{key}" if name else str(key))
        elif type(state) in (list, tuple):
            for index, value in enumerate(state):
                self._walk(value, f"{name}.{index}" if name else str(index))
        else:
            kind = f"{type(state).__module__}.{type(state).__qualname__}"
            raise TypeError(
                f"state[{name!r}] is a {kind}: only tensors, dict, list, tuple and plain values (None, bool, int, "
                "float, str, torch.dtype) are saved"
            )

    def _add(self, tensor: Tensor, name: str) -> None:
        if type(tensor) not in _TENSORS or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            kind = f"{type(tensor).__name__} ({tensor.layout}, {tensor.device})"
            raise TypeError(f"state[{name!r}] is a {kind}: only dense tensors are saved")
        if name in self.shapes:
            raise ValueError(f"two tensors of the state are called {name!r}")
        self.shapes[name] = described(tensor)
        memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        identity = (*memory, tensor.is_conj(), tensor.is_neg())
        slot = self._slot_of.setdefault(identity, len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(tensor.detach() if tensor.requires_grad or type(tensor) is not Tensor else tensor)
        self._slots.append(slot)

    def bytes_needed(self) -> int:
        """Upper bound for the bytes of the data file, where storages are aligned and each has a header."""
        return sum(tensor.nbytes for tensor in self.tensors) + 512 * len(self.tensors) + 64 * 1024

    def state_over(self, tensors: list[Tensor]) -> Any:
        """The state with `tensors[i]` in the place of `self.tensors[i]`."""
        chosen = map(tensors.__getitem__, self._slots)
        return replaced(self._state, lambda leaf, _: next(chosen) if isinstance(leaf, Tensor) else leaf)

    def state_on_cpu(self) -> Any:
        """The state on the CPU, each tensor owning just its own bytes; copies only where needed."""
        own = []
        for tensor in self.tensors:
            if tensor.device.type != "cpu":
                tensor = tensor.cpu()
            elif tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()
            own.append(tensor.resolve_conj().resolve_neg())
        return self.state_over(own)


def describe(state: Any) -> Shapes:
    """Dotted name → [dtype, shape] of every tensor in `state`, for `load(expect=…)`.

    Raises TypeError, naming the key, for what cannot be saved, and ValueError where two tensors share one dotted name.
    """
    return StateTensors(state).shapes


def in_host_memory(state: Any, device: torch.device) -> Any:
    """A state of what runs on `device`, as other processes can take it: from a GPU copied, as each has its own."""
    return state if device.type == "cpu" else StateTensors(state).state_on_cpu()


def _is_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_key, key)))


def described(tensor: Any) -> list[Any]:
    """The dtype and the sizes of a tensor, as they stand in `Shapes`; of anything with `dtype` and `shape`."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def replaced(state: Any, replace: Callable[[Any, str], Any], name: str = "") -> Any:
    """The state with `replace(leaf, dotted name)` in the place of whatever is no dict, list or tuple."""
    if isinstance(state, Mapping):
        start = f"{name}." if name else ""
        items = [(key, replaced(value, replace, f"{start}{key}")) for key, value in state.items()]
        if isinstance(state, Counter):  # MultiStepLR keeps its milestones in a Counter
            return Counter(dict(items))
        if not isinstance(state, OrderedDict):
            return dict(items)
        ordered = OrderedDict(items)
        if (versions := module_versions(state)) is not None:
            copied = StateTensors(versions)  # which raises for what could not be read back
            set_module_versions(ordered, copied.state_over(copied.tensors))
        return ordered
    if type(state) in (list, tuple):
        start = f"{name}." if name else ""
        return type(state)([replaced(value, replace, f"{start}{index}") for index, value in enumerate(state)])
    return replace(state, name)


def leaves(state: Any) -> dict[str, Any]:
    """Dotted name → whatever is no dict, list or tuple."""
    found: dict[str, Any] = {}
    replaced(state, lambda leaf, name: found.setdefault(name, leaf))
    return found


def oversized(state: Any, size: int) -> str | None:
    """The dotted name of a tensor of more bytes than the file of `size` bytes that it was read from; None without one.

    One number can stand for all of a tensor that was expanded, and a copy of it would fill the memory.
    """
    tensors = ((name, leaf) for name, leaf in leaves(state).items() if isinstance(leaf, Tensor))
    return next((name for name, tensor in tensors if tensor.numel() * tensor.element_size() > size), None)


class Snapshots:
    """Copies of a state on the CPU, in buffers that are kept from one copy to the next.

    CUDA tensors are copied to pinned memory while the host goes on; `ready()` waits for these copies, in any thread.
    CUDA tensors that only an update changes are copied on streams of their own, beside the training; `let_change()`
    makes the training stream wait for these copies on the device.
    """

    def __init__(self) -> None:
        self._layout: list[tuple[Any, ...]] = []
        self._copies: list[Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: list[torch.cuda.Event] = []
        self._aside: list[tuple[torch.device, torch.cuda.Event, list[Tensor]]] = []
        self._left: deque[tuple[Tensor, Tensor]] = deque()
        """The buffers and tensors in host memory that no thread has begun to copy."""
        self._missing, self._failed = 0, False
        self._guard = threading.Lock()
        self._arrived = threading.Event()
        self._arrived.set()

    def copy(self, own: StateTensors, now: Iterable[Tensor] | None = None) -> Any:
        """The state over buffers of this object, valid until the next `copy`.

        With `now`, only these tensors are copied at once: the others may change only after `carry_on` and `let_change`.
        `carry_on` copies those of them in host memory; those on CUDA devices are copied beside the training.
        """
        layout = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cuda) for tensor in own.tensors]
        if layout != self._layout:
            self._copies = []  # freed before the new ones are made
            self._copies = [torch.empty_like(each, device="cpu", pin_memory=each.is_cuda) for each in own.tensors]
            self._layout = layout
        first = None if now is None else {tensor.data_ptr() for tensor in now}
        at_once, aside = [], []
        for buffer, tensor in zip(self._copies, own.tensors, strict=True):
            if first is None or tensor.data_ptr() in first:
                at_once.append((buffer, tensor))
            elif tensor.is_cuda:
                aside.append((buffer, tensor))
            else:
                self._left.append((buffer, tensor))
        # Host memory at once, and CUDA tensors on their current stream, where they may change right after it.
        if at_once:
            foreach_copy_([buffer for buffer, _ in at_once], [tensor for _, tensor in at_once], non_blocking=True)
        devices = {tensor.device for _, tensor in at_once if tensor.is_cuda}
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._copy_aside(aside)
        self._missing, self._failed = len(self._left), False
        if self._missing:
            self._arrived.clear()
        return own.state_over(self._copies)

    @property
    def arrived(self) -> bool:
        """Whether nothing is left to copy, and nothing is being copied."""
        return self._arrived.is_set()

    def carry_on(self) -> None:
        """Copy what `copy` has left for later, and return when all of it has arrived.

        Several threads may call this at once: each copies tensors that no other thread has taken, then waits for the
        others. Raises RuntimeError where another thread's copy failed.
        """
        while self._left:
            try:
                buffer, tensor = self._left.popleft()
            except IndexError:
                break
            try:
                buffer.copy_(tensor)
            except BaseException:
                self._failed = True
                raise
            finally:
                with self._guard:
                    self._missing -= 1
                    if not self._missing:
                        self._arrived.set()
        self._arrived.wait()
        if self._failed:
            raise RuntimeError("a part of the state could not be copied")

    def let_change(self) -> None:
        """Let what comes next on each current CUDA stream come after the copies made beside it, on the device."""
        for device, copied, _ in self._aside:
            torch.cuda.current_stream(device).wait_event(copied)
        self._aside = []

    def _copy_aside(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy CUDA tensors on a stream of their own, once all is done that the current stream has been given."""
        for device in {tensor.device for _, tensor in pairs}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            side = self._streams[device]
            side.wait_stream(torch.cuda.current_stream(device))
            here = [pair for pair in pairs if pair[1].device == device]
            with torch.cuda.stream(side):
                foreach_copy_([buffer for buffer, _ in here], [tensor for _, tensor in here], non_blocking=True)
            self._events.append(side.record_event())
            # Held until the training stream waits for the copies: memory that was freed earlier could be reused there.
            self._aside.append((device, self._events[-1], [tensor for _, tensor in here]))

    def ready(self) -> None:
        """Return when every byte of the last copy has arrived."""
        for event in self._events:
            event.synchronize()


_ITEMS, _LONGEST = "items of a deque", "maxlen"


def without_queues(state: Any) -> Any:
    """The state with a dict of its items in the place of each queue (`collections.deque`), and with plain numbers.

    `torch.load(weights_only=True)` reads no queue, and no number of NumPy's or of an IntEnum.
    """

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
    generator. A state without groups has a form of its own, which its optimizer knows how to load.
    """
    optimizer.load_state_dict(dict(state))
    if "param_groups" not in state:
        return
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
