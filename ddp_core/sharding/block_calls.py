"""All ranks call the same blocks in the same sequence, because each call gathers parameters from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .blocks import refusal

_END = -1
"""Stands for the end of a forward in the place of a block's number."""


class BlockCalls:
    """Compares the forwards of a `module` whose `blocks` are gathered by the ranks of `group`, before each gather.

    Gathers are paired by their sequence alone: where one rank leaves a block out, it would get parameters of another
    block, or wait for ever. In the first forward in training, and in the first in evaluation, ranks agree on each call;
    each later forward must repeat that one. Raises UserError (2), in a first forward on every rank.
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group, self._device = group, device
        names = {part: name for name, part in module.named_modules()}
        self._names = [names[block] for block in blocks]
        self._agreed: dict[bool, list[int]] = {}
        """The numbers of the blocks that a forward calls, in training and in evaluation, and the end."""
        self._calls: list[int] | None = None
        """Of the forward that runs; None outside, where a backward may call blocks again."""
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_block, number), prepend=True)
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._calls = []

    def _before_block(self, number: int, module: nn.Module, _: Any) -> None:
        if self._calls is not None:
            self._add(number, module.training)

    def _end(self, module: nn.Module, *_: Any) -> None:
        self._add(_END, module.training)
        assert self._calls is not None
        self._agreed[module.training] = self._calls
        self._calls = None

    def _add(self, number: int, is_training: bool) -> None:
        assert self._calls is not None
        if (agreed := self._agreed.get(is_training)) is not None:
            # The last call of a forward is its end, after which none comes.
            self._require_same([number, agreed[len(self._calls)]])
        else:
            everyones = list(torch.empty(self._group.size(), dtype=torch.int64, device=self._device).split(1))
            dist.all_gather(everyones, torch.tensor([number], device=self._device), group=self._group)
            self._require_same([int(each) for each in everyones])
        self._calls.append(number)

    def _require_same(self, numbers: Sequence[int]) -> None:
        if len(set(numbers)) > 1:
            found = " and ".join(sorted({"its end" if each == _END else self._names[each] for each in numbers}))
            raise refusal(
                f"with some samples its forward comes to {found} in another sequence than with others, and each call "
                "gathers parameters from all ranks: let it call the same layers with all samples (no layer that is "
                "left out at random, no large expert that only some samples reach)"
            )
