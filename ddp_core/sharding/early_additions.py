"""Adds a gradient to the partial sums that wait for it as soon as backward has made it, while caches still hold it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ddp_core.base.user_code import our_code
from ddp_core.reduction.tree import GradientTree, Subtree


class EarlyAdditions:
    """Adds to each gradient, in a hook, the subtrees that its micro-batch completes; `.grad` then holds the sum.

    The same additions as those of `GradientTree.push`, which finds None in these subtrees afterwards. In host memory
    only: on a device, one addition for many tensors is quicker than one for each.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._waiting: list[Subtree] = []
        self._added: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._made, position))
            for position, parameter in enumerate(parameters)
            if parameter.device.type == "cpu"
        ]

    def begin(self, tree: GradientTree) -> None:
        """In the backward that follows, gradients are those of the tree's next leaf."""
        self._waiting = tree.completed_by_next()
        self._added.clear()

    def stop(self) -> None:
        """Add nothing more."""
        self._waiting = []

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    @our_code
    def _made(self, position: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self._waiting or gradient is None or gradient.is_sparse:
            return
        if position in self._added:
            raise twice(parameter)
        self._added.add(position)
        for subtree in self._waiting:
            left, subtree.tensors[position] = subtree.tensors[position], None
            if left is not None:
                gradient = left.add_(gradient)
        parameter.grad = gradient


def twice(parameter: Tensor) -> RuntimeError:
    """The error for a gradient that backward adds to after it was used."""
    return RuntimeError(
        f"a parameter of shape {list(parameter.shape)} got gradients twice in one backward, when the first was already "
        "used: use torch.utils.checkpoint with use_reentrant=False"
    )
