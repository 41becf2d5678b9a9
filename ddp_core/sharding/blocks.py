"""The modules of a sharded model that are gathered and freed as one: which they are, and what ranks must do alike.

All ranks come to the same blocks in the same sequence, because at each they gather parameters from all of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import at_the_end_of_backward, has_hooks, writes_to
from ddp_core.base.user_code import our_code
from ddp_core.checkpoint.state import leaves
from ddp_core.reduction.agreement import gathered
from ddp_core.reduction.watching import DependsOnLayout

FEWEST_ELEMENTS = 64 * 1024
"""A block with fewer elements costs more in messages than its memory is worth."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_END = -1
"""Stands for the end of a forward or backward in the place of a block's number."""


def blocks_of(module: nn.Module, fewest_elements: int = FEWEST_ELEMENTS) -> list[nn.Module]:
    """The blocks of a model, in the sequence of its modules: the repeated parts that deep models are made of.

    A block is a module that stands in a ModuleList, a ModuleDict or a Sequential, is none of these itself, has
    `fewest_elements` elements or more, and shares no parameter with a module outside of it. Blocks do not lie within
    blocks. What belongs to no block stays with the model itself, which is gathered for the whole of a pass.
    """
    uses, found = _uses(module), list[nn.Module]()
    places = Counter(part for _, part in module.named_modules(remove_duplicate=False))

    def descend(parent: nn.Module) -> None:
        for child in parent.children():
            if not isinstance(parent, _CONTAINERS) or isinstance(child, _CONTAINERS):
                descend(child)
            elif child not in found and sum(map(Tensor.numel, child.parameters())) >= fewest_elements:
                inside = _uses(child)
                if all(count * places[child] == uses[parameter] for parameter, count in inside.items()):
                    found.append(child)

    descend(module)
    return found


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many parts of the module each parameter is registered; a part may stand in two places."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    own = (part.named_parameters(recurse=False) for part in parts)
    return Counter(parameter for parameters in own for _, parameter in parameters)


def refusal(reason: str) -> UserError:
    """The UserError (2) for a model that fully_shard cannot wrap for this reason."""
    return UserError(f"the parameters of this model cannot be sharded: {reason}; or use shard mode gradients")


def refuse_unsuitable(module: nn.Module) -> None:
    """Raise UserError (2) where a parameter cannot be cut between rows, or has a hook that its rows would lack."""
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise refusal(f"{name} is a single number, which cannot be cut: give it the shape [1]")
        if not parameter.numel():
            raise refusal(f"{name} has no elements, so there is nothing to cut: leave it out")
        if not parameter.is_contiguous():
            raise refusal(f"{name} does not lie row by row in memory: leave out memory_format")
        if has_hooks(parameter):
            raise refusal(f"{name} has a hook on its gradient, which the parameter in its place would not have")


class WholeParameters:
    """Whole parameters that nothing is kept of: those `gathered` for a pass, and those `replaced` when ranks cut them.

    What something writes to them is lost, as is a change of their `requires_grad`. Writes through `.data` are not seen.
    """

    def __init__(self, gathered: Mapping[str, Tensor], replaced: Mapping[str, Tensor]) -> None:
        both = [*gathered.items(), *replaced.items()]
        # Whoever holds a parameter that was replaced is looked at; this object must not hold it.
        self._named = [(name, weakref.ref(tensor)) for name, tensor in both]
        self._before = self._now()

    def refuse_changes(self) -> None:
        """Raise UserError (2) where something outside of a pass has changed one of them."""
        if (name := self._changed()) is not None:
            raise refusal(
                f"{name} was changed outside of forward where nothing keeps it: in a list of parameters from before "
                "they were cut, or right after a forward of a callback; take parameters from the model when you "
                "change them, before such a forward"
            )

    @contextlib.contextmanager
    def exact_pass(self) -> Iterator[None]:
        """Raise DependsOnLayout where the pass inside changes one of them, and UserError (2) where it bypasses a block.

        Nothing but the call of a block gathers its parameters.
        """
        self.refuse_changes()
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise refusal(
                "its forward uses the parameters of a module in a ModuleList or Sequential without calling that module"
            ) from error
        if (name := self._changed()) is not None:
            self._before = self._now()  # said once, of the pass that has done it
            raise DependsOnLayout(
                f"forward changes the parameter {name}, which shard mode parameters frees after each pass, so the "
                "change would be lost: change weights in the optimizer, or use shard mode gradients"
            )

    def _changed(self) -> str | None:
        pairs = zip(self._named, self._now(), self._before, strict=True)
        return next((name for (name, _), now, before in pairs if now is not None and now != before), None)

    def _now(self) -> list[tuple[int, bool] | None]:
        alive = (tensor() for _, tensor in self._named)
        return [None if tensor is None else (writes_to(tensor), tensor.requires_grad) for tensor in alive]


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
