"""Every operation on tensors that a rank makes from its first forward pass on, so that `replay` can make it again.

A TorchDispatchMode sees the operations below autograd: those of forward, backward, clipping and the optimizer, whoever
has written them, and the all-reduces that DDP starts from C++. A tensor is told by its storage and the place in it, so
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
    reduction: int | None = None
    """The number of the all-reduce that has written it, where it was one."""


@dataclass(frozen=True)
class Operation:
    """One operation of torch, such as `aten.mul.Tensor`: what it was given, what it has made, as Places."""

    name: str
    given: tuple[Any, Any]
    made: Any
    generator: bytes | None
    """The state of torch's generator, for an operation that draws from it."""


@dataclass(frozen=True)
class Reduction:
    """An all-reduce over all ranks: which one it is, its tensors, and its operation (SUM, AVG, MAX, …)."""

    number: int
    places: list[Place]
    operation: str


@dataclass(frozen=True)
class StepMade:
    """An optimizer has made a step: where the weights are, by name, and the digests that they have then."""

    places: dict[str, Place]
    digests: dict[str, str]


Entry = Content | Operation | Reduction | StepMade


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
        # Written to by a collective since they were last read: the number of the all-reduce, or None.
        self._stale: dict[int, int | None] = {}
        self._reductions = 0
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
        is_off = self.problem or self._is_paused or not self._steps_left or os.getpid() != self._process
        if is_off or func.namespace == "profiler":
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
        """Note an all-reduce; of another collective, that it may write to all of its tensors."""
        number: int | None = None
        if str(func) == "c10d.allreduce_.default":
            if torch.distributed.ProcessGroup.unbox(args[1]).size() != torch.distributed.get_world_size():
                raise _Untold("some of its ranks reduce among themselves")
            number, self._reductions = self._reductions, self._reductions + 1
            operation = torch.distributed.ReduceOp.RedOpType(int(args[2].op())).name
            self._entries.append(Reduction(number, [self._seen(each) for each in args[0]], operation))
        elif "reduce" in str(func) or func.namespace != "c10d":
            raise _Untold(f"{func} is not replayed")
        tensors: list[Tensor] = []
        mapped(lambda each: tensors.append(each) if isinstance(each, Tensor) else None, (tuple(args), named))

        def finish(result: Any) -> None:
            for each in tensors:
                if (known := self._numbers.get(StorageWeakRef(each.untyped_storage()))) is not None:
                    self._stale[known] = number

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
        return Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())), is_new


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
