"""CUDA graphs: the operations of one thread are noted, and made again by each replay.

As on CUDA, recording changes nothing: what was written is put back, and what is new holds rubbish until a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.standin_cuda import tags
from tests.support.standin_cuda.world import WORLD


class CUDAGraph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[tuple[Any, Any, Sequence[Any], Mapping[str, Any], list[Tensor], Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        self._new: dict[int, tuple[Any, Tensor]] = {}
        self._is_spoilt = self._is_ready = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        from tests.support.standin_cuda.streams import current_stream

        if current_stream().is_default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if WORLD.here.recording is not None:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        WORLD.here.recording = self

    def capture_end(self) -> None:
        WORLD.here.recording = None
        _plain(self._put_back)
        self._before.clear()
        if self._is_spoilt:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        self._is_ready = True

    def _put_back(self) -> None:
        for memory, values in self._before.values():
            memory.copy_(values)
        for memory, tensor in self._new.values():
            # NaN, or a number that is an index at least. Not written through the tensor, which autograd would notice.
            memory.fill_(255 if tensor.is_floating_point() else 0)

    def spoil(self) -> None:
        """Something was done that no graph can hold."""
        self._is_spoilt = True

    def before(self, func: Any, facts: Any, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        """An operation comes: keep what it will write to."""
        for place, name in facts.written:
            operand = args[place] if place < len(args) else given.get(name)
            for tensor in operand if isinstance(operand, list | tuple) else [operand]:
                memory = tags.memory_of(tensor) if isinstance(tensor, Tensor) else None
                if memory is not None and memory._cdata not in {**self._before, **self._new}:
                    self._before[memory._cdata] = memory, _copy(memory)

    def after(
        self, func: Any, facts: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any, device: Any
    ) -> None:
        """An operation was made: note it, and what it has made anew."""
        from tests.support.standin_cuda.operations import _tensors

        operands = [tags.memory_of(each) for each in _tensors((args, given))]
        results, fresh = list(_tensors(result)), []
        for tensor in results:
            memory = tags.memory_of(tensor)
            is_new = memory is not None and not any(memory is each for each in operands)
            fresh.append(is_new)
            if is_new and memory is not None:
                self._new[memory._cdata] = memory, tensor
        self._steps.append((func, facts, args, given, results, (fresh, device)))

    def replay(self) -> None:
        if not self._is_ready:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        _plain(self._replay)

    def _replay(self) -> None:
        from tests.support.standin_cuda.operations import _draw, _tensors

        for func, facts, args, given, results, (fresh, device) in self._steps:
            made = _draw(func, args, given, device) if facts.draws else func(*args, **given)
            for old, new, is_new in zip(results, _tensors(made), fresh, strict=True):
                if is_new and old.numel():
                    old.data.copy_(new)

    def pool(self) -> tuple[int, int]:
        return (0, 1)


def _plain(function: Any) -> None:
    """Call it below autograd and below the watch."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        function()


def _copy(memory: Any) -> Any:
    copied = torch.UntypedStorage(memory.nbytes())
    copied.copy_(memory)
    return copied
