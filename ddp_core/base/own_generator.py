"""Torch's random numbers for one thread: its default generator of the CPU is one for all threads of a process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from ddp_core.base.torch_internals import TorchDispatchMode


class _Here(threading.local):
    own: OwnGenerator | None = None


_here = _Here()
_lending = threading.Lock()
"""Held while torch's default generator stands for a thread's own."""


class _DefaultGenerator:
    """What the functions of torch.random work on: the thread's own generator, or torch's default one."""

    def __init__(self, real: torch.Generator) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        own = _here.own
        if own is None:
            return getattr(self._real, name)
        own.has_told_state = own.has_told_state or name == "get_state"
        return getattr(own.generator, name)


class OwnGenerator(TorchDispatchMode):
    """Hands `generator` to every random operation that this thread calls without a generator.

    In the block, `torch.manual_seed`, `torch.get_rng_state`, `torch.random.fork_rng` and their like mean `generator`,
    too: what a model seeds itself, and what activation checkpointing draws again, stays in the thread.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The functions of torch.random learn of threads. Operations on tensors draw from the default generator all the
        # same, and are handed another one below.
        module: Any = torch.random
        if isinstance(module.default_generator, torch.Generator):
            module.default_generator = _DefaultGenerator(module.default_generator)
        self.generator = generator
        self.has_drawn = False
        """Whether an operation has drawn random numbers."""
        self.has_told_state = False
        """Whether somebody has asked for the generator's state, as activation checkpointing does to draw again."""
        self._before: OwnGenerator | None = None

    def __enter__(self) -> Self:
        self._before, _here.own = _here.own, self
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _here.own = self._before
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        if _argument(func, "dropout_p", args, given) == 0:
            return func(*args, **given)  # an attention that drops nothing
        self.has_drawn = True
        if given.get("generator") is None:
            # The overload that takes a generator has a name of its own, or is this one.
            packet, overload = func.overloadpacket, func.name().partition(".")[2]
            name = f"{overload}_generator" if overload else "generator"
            func = getattr(packet, name) if name in packet.overloads() else func
            if all(argument.name != "generator" for argument in func._schema.arguments):
                return self._lent(func, args, given)
            given["generator"] = self.generator
        return func(*args, **given)

    def _lent(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Call an operation that draws from the default generator and from no other: that has the thread's state."""
        default = torch.default_generator
        with _lending:
            before = default.get_state()
            default.set_state(self.generator.get_state())
            try:
                return func(*args, **given)
            finally:
                self.generator.set_state(default.get_state())
                default.set_state(before)


def _argument(func: Any, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """What an operation is called with for its argument of this name; None where it has none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return given.get(name, args[place] if place < len(args) else argument.default_value)
    return None
