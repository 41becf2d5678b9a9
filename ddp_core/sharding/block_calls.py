"""All ranks come to the same blocks in the same sequence, because at each they gather parameters from all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.base.torch_internals import at_the_end_of_backward
from ddp_core.base.user_code import our_code
from ddp_core.checkpoint.state import leaves
from ddp_core.reduction.agreement import gathered

from .blocks import refusal

_END = -1
"""Stands for the end of a forward or backward in the place of a block's number."""


class BlockCalls:
    """Compares the passes of a `module` whose `blocks` are gathered by the ranks of `group`, before each gather.

    Gathers are paired by their sequence alone: where one rank leaves a block out, it would get parameters of another
    block, or wait for ever. A forward gathers a block when it is called, a backward when it comes to an output of it.
    In the first forward in training, in the first in evaluation and in the first backward, ranks agree on each block;
    each later one must repeat that one. Raises UserError (2), in a first one on every rank.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        self._group = group
        names = {part: name for name, part in module.named_modules()}
        self._names = [names[block] for block in blocks]
        self._agreed: dict[str, list[int]] = {}
        """By the kind of pass: the numbers of the blocks that it comes to, and the end."""
        self._forward: list[int] | None = None
        """The blocks that the forward that runs has called; None outside, where a backward may call blocks again."""
        self._backward: list[int] | None = None
        """The blocks that the backward that runs has come to, each once."""
        for number, block in enumerate(blocks):
            # Before the hooks of fully_shard, which gather.
            block.register_forward_pre_hook(partial(self._before_block, number), prepend=True)
            block.register_forward_hook(partial(self._after_block, number), prepend=True)
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._forward = []

    def _before_block(self, number: int, module: nn.Module, _: Any) -> None:
        if self._forward is not None:
            self._add(number, self._forward, _kind(module))

    def _after_block(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in _with_gradients(output):
            tensor.register_hook(partial(self._before_backward_of, number))

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        assert self._forward is not None
        self._add(_END, self._forward, _kind(module))
        self._forward = None
        for tensor in _with_gradients(output):
            tensor.register_hook(self._begin_backward)

    @our_code
    def _begin_backward(self, _: Tensor) -> None:
        if self._backward is None:
            self._backward = []
            at_the_end_of_backward(self._end_backward)

    @our_code
    def _before_backward_of(self, number: int, gradient: Tensor) -> None:
        self._begin_backward(gradient)
        assert self._backward is not None
        if number not in self._backward:
            self._add(number, self._backward, "backward")

    def _end_backward(self) -> None:
        assert self._backward is not None
        self._add(_END, self._backward, "backward")
        self._backward = None

    def _add(self, number: int, passed: list[int], kind: str) -> None:
        if (agreed := self._agreed.get(kind)) is not None:
            # The last one of a pass is its end, after which none comes.
            self._require_same([number, agreed[len(passed)]], kind)
        else:
            self._require_same(gathered(number, self._group), kind)
        passed.append(number)
        if number == _END:
            self._agreed[kind] = passed

    def _require_same(self, numbers: Sequence[int], kind: str) -> None:
        if len(set(numbers)) > 1:
            found = " and ".join(sorted({"its end" if each == _END else self._names[each] for each in numbers}))
            raise refusal(
                f"with some samples its {kind} comes to {found} in another sequence than with others, where parameters "
                "are gathered from all ranks: let it call the same layers with all samples, and let the loss depend on "
                "all of them (no layer that is left out at random, no large expert that only some samples reach)"
            )


def _kind(module: nn.Module) -> str:
    return "forward" if module.training else "forward in evaluation"


def _with_gradients(output: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(output).values() if isinstance(leaf, Tensor) and leaf.requires_grad)
