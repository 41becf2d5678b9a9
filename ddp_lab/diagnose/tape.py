"""Every operation on tensors that a rank makes from its first forward pass on, so that `replay` can make it again.

A TorchDispatchMode sees the operations below autograd: those of forward, backward, clipping and the optimizer, whoever
has written them, and the collectives that DDP starts from C++. A tensor is told by its storage and the place in it, so
views and in-place operations need no care. What an operation reads and no operation has made (weights, batches) is
written down as bytes; so is what a collective has left in a storage, when it is next read.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_core.base.torch_internals import TorchDispatchMode

MOST_BYTES = 1 << 30
"""So much at most is written by a rank of what its operations read."""


class Place(NamedTuple):
    """A tensor: the number of its storage, and where and how it lies in there."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Whole(NamedTuple):
    """A storage that an operation is given as such, as when a tensor is copied deeply: its number."""

    storage: int


class Constant(NamedTuple):
    """A layout or a memory format, by its name in torch."""

    name: str


@dataclass(frozen=True)
class Content:
    """The bytes of a storage, when it is first read, or first read again after a collective has written to it."""

    storage: int
    content: bytes
    exchange: int | None = None
    """The number of the exchange that has written it, where it was one."""


@dataclass(frozen=True)
class Operation:
    """One operation of torch, such as `aten.mul.Tensor`: what it was given, what it has made, as Places."""

    name: str
    given: tuple[Any, Any]
    made: Any
    generator: bytes | None
    """The state of torch's generator, for an operation that draws from it."""


@dataclass(frozen=True)
class Exchange:
    """A collective of all ranks: which one it is, the tensors that it reads and those that it writes.

    `received` has a list of tensors for each that is `given`: one, or of an all-gather into many one for each rank.
    """

    number: int
    kind: str
    given: list[Place]
    received: list[list[Place]]
    operation: str = ""
    """Of an all-reduce: SUM, AVG, MAX, …"""
    root: int = 0
    """Of a broadcast or a scatter."""


@dataclass(frozen=True)
class StepMade:
    """An optimizer has made a step: where the weights are, by name, and the digests that they have then."""

    places: dict[str, Place]
    digests: dict[str, str]


Entry = Content | Operation | Exchange | StepMade
_EXCHANGES: dict[str, Callable[[Sequence[Any]], tuple[list[Tensor], list[list[Tensor]], Any]]] = {
    "allreduce_": lambda args: (args[0], [[each] for each in args[0]], args[1]),
    "broadcast_": lambda args: (args[0], [[each] for each in args[0]], args[1]),
    "allgather_": lambda args: (args[1], args[0], args[2]),
    "_allgather_base_": lambda args: ([args[1]], [[args[0]]], args[2]),
    "scatter_": lambda args: ([each for some in args[1] for each in some], [[each] for each in args[0]], args[2]),
}
"""By the collectives that can be made again: what they read, what they write, and their group, of their arguments."""
_ROOTS = {"broadcast_": 2, "scatter_": 3}
"""By the collectives that have one, where its rank stands among their arguments."""


class Tape(TorchDispatchMode):
    """Writes down what this process does in some optimizer steps; `problem` says why it cannot, where it cannot."""

    def __init__(self, steps: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem = ""
        self._steps_left = steps
        self._process = os.getpid()
        self._is_running = self._is_paused = False
        self._entries: list[Entry] = []
        self._numbers: dict[StorageWeakRef, int] = {}
        # Written to by a collective since they were last read: the number of the exchange, or None.
        self._stale: dict[int, int | None] = {}
        self._exchanges = 0
        self._bytes = 0

    def begin(self) -> None:
        """Begin with the next operation, if that has not been done."""
        if not self._is_running and self._steps_left:
            self._is_running = True
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done meanwhile, such as making a batch: what comes of it is read as bytes."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def step(self, weights: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """An optimizer has made its step."""
        if self._steps_left:
            self._entries.append(StepMade({name: self._seen(each) for name, each in weights.items()}, dict(digests)))
            self._steps_left -= 1

    def write(self, file: Path) -> None:
        """Write the tape, or its problem."""
        with file.open("wb") as out:
            pickle.dump((self.problem, [] if self.problem else self._entries), out, pickle.HIGHEST_PROTOCOL)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Make the operation, and write it down."""
        named = dict(kwargs or {})
        if not self._is_on or func.namespace == "profiler":
            return func(*args, **named)
        told = self._collective if func.namespace in ("c10d", "_c10d_functional") else self._operation
        finish: Callable[[Any], None] | None = None
        with self._or_problem():
            finish = told(func, args, named)
        result = func(*args, **named)
        if finish is not None:
            with self._or_problem():
                finish(result)
        return result

    @property
    def _is_on(self) -> bool:
        return not self.problem and not self._is_paused and self._steps_left > 0 and os.getpid() == self._process

    @contextmanager
    def _or_problem(self) -> Iterator[None]:
        try:
            yield
        except _Untold as untold:
            self.problem, self._entries = str(untold), []

    def _operation(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Callable[[Any], None]:
        """Note what the operation is given; the answer notes what it has made."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generator = torch.get_rng_state().numpy().tobytes() if draws else None
        given = mapped(self._told, (tuple(args), named))

        def finish(result: Any) -> None:
            self._entries.append(Operation(str(func), given, mapped(self._made, result), generator))

        return finish

    def _collective(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Callable[[Any], None]:
        """Note a collective that one process can make of what all ranks give to it."""
        kind = str(func).removeprefix("c10d.").removesuffix(".default")
        if kind == "barrier":
            return lambda result: None
        if kind not in _EXCHANGES:
            raise _Untold(f"{func} is not made again in one process")
        given, received, group = _EXCHANGES[kind](args)
        if torch.distributed.ProcessGroup.unbox(group).size() != torch.distributed.get_world_size():
            raise _Untold("some of its ranks exchange among themselves")
        number, self._exchanges = self._exchanges, self._exchanges + 1
        operation = torch.distributed.ReduceOp.RedOpType(int(args[2].op())).name if kind == "allreduce_" else ""
        places = [self._seen(each) for each in given], [[self._seen(each) for each in into] for into in received]
        root = args[_ROOTS[kind]] if kind in _ROOTS else 0
        self._entries.append(Exchange(number, kind, *places, operation, root))

        def finish(result: Any) -> None:
            for each in (each for into in received for each in into):
                self._stale[self._place(each)[0].storage] = number

        return finish

    def _told(self, each: Any) -> Any:
        """What an operation was given: of tensors their places; a generator stays torch's own one."""
        if isinstance(each, Tensor):
            return self._seen(each)
        if isinstance(each, torch.UntypedStorage):
            return Whole(self._seen(torch.empty(0, dtype=torch.uint8).set_(each)).storage)
        if isinstance(each, torch.ScriptObject | torch.TypedStorage):
            raise _Untold(f"it computes with a {type(each).__name__}")
        if isinstance(each, torch.layout | torch.memory_format):
            return Constant(str(each).removeprefix("torch."))
        if isinstance(each, torch.Generator):
            if each is not torch.default_generator:
                raise _Untold("it draws from a generator of its own")
            return None
        return each

    def _seen(self, tensor: Tensor) -> Place:
        """The tensor's place; the bytes of its storage are written where no operation has made them."""
        place, is_new = self._place(tensor)
        if is_new or place.storage in self._stale:
            content = tensor.untyped_storage()
            self._bytes += len(content)
            if self._bytes > MOST_BYTES:
                raise _Untold(f"its data and weights are more than {MOST_BYTES >> 30} GiB")
            copied = torch.empty(0, dtype=torch.uint8).set_(content) if len(content) else torch.empty(0)
            cause = self._stale.pop(place.storage, None)
            self._entries.append(Content(place.storage, copied.numpy().tobytes(), cause))
        return place

    def _made(self, each: Any) -> Any:
        return self._place(each)[0] if isinstance(each, Tensor) else None

    def _place(self, tensor: Tensor) -> tuple[Place, bool]:
        if tensor.layout != torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise _Untold(f"it computes with a {type(tensor).__name__} of layout {tensor.layout}")
        key = StorageWeakRef(tensor.untyped_storage())
        is_new = key not in self._numbers
        number = self._numbers.setdefault(key, len(self._numbers))
        lies = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return Place(number, tensor.dtype, *lies), is_new


class _Untold(Exception):
    """This script does something that a tape cannot hold."""


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree of tuples, lists and dicts with the function's result in the place of each leaf, such as a Place."""
    if isinstance(tree, dict):
        return {key: mapped(function, each) for key, each in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, Place | Whole | Constant | torch.Size):
        parts = [mapped(function, each) for each in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return function(tree)


def read_tape(file: Path) -> tuple[str, list[Entry]]:
    """What `Tape.write` has written: the problem, or empty, and the entries."""
    with file.open("rb") as content:
        return pickle.load(content)  # type: ignore[no-any-return]
