"""Which operation has other bits: what each one has computed is noted, and two trainings are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from ddp_core.base.digests import checksum
from ddp_core.base.torch_internals import TorchDispatchMode
from ddp_core.base.trees import tensors_of

Noted = Sequence[Sequence[str]]
"""In the order in which it was computed: what, in words, and the checksum of the result."""


class Operations(TorchDispatchMode):
    """Notes, in a `with` block, the result of each operation; and each gradient that comes back to a part of `model`.

    Not for a model that computes in several threads.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[tuple[str, str]] = []
        self._model, self._within = model, list[str]()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, part in self._model.named_modules():
            where = f"{name or 'the model'} ({type(part).__name__})"
            self._hooks.append(part.register_forward_pre_hook(partial(self._begin, where)))
            self._hooks.append(part.register_forward_hook(self._end))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "empty" not in str(function):  # what lies in fresh memory is no result
            self.note(f"the result of {function} in {self._within[-1] if self._within else 'the loss'}", result)
        return result

    def _begin(self, where: str, part: nn.Module, inputs: Any) -> None:
        self._within.append(where)

    def _end(self, part: nn.Module, inputs: Any, outputs: Any) -> None:
        where = self._within.pop()
        for output in tensors_of(outputs):
            if output.requires_grad:
                output.register_hook(partial(self.note, f"the gradient that comes back to {where}"))

    def note(self, what: str, result: Any) -> None:
        """Note tensors that were computed, or given."""
        self.noted += [(what, checksum(each)) for each in tensors_of(result)]


def differing(ours: Noted, theirs: Noted) -> Iterator[str]:
    """What both have computed with unlike results, in words and in its order; ends where the two part."""
    for (what, one), (other, another) in zip(ours, theirs, strict=False):
        if what != other:
            return
        if one != another:
            yield what
