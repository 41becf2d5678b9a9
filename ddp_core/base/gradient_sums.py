"""Checksums of the gradients that a backward makes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .digests import digest_of_sums, sums
from .user_code import our_code


class GradientSums:
    """Notes checksums of the gradients that a backward makes for `tensors`, before anything is done with them.

    The hooks are on autograd's nodes: those of a tensor may be shared with other replicas.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._nodes = {name: get_gradient_edge(each).node for name, each in tensors.items() if each.requires_grad}
        self._sums: dict[str, list[Tensor]] = {}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> GradientSums:
        self._sums = {}
        self._hooks = [node.register_prehook(partial(self._made, name)) for name, node in self._nodes.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def checksums(self) -> dict[str, str]:
        """By name; on CUDA this waits for the device."""
        return {name: digest_of_sums(parts) for name, parts in self._sums.items()}

    @our_code
    def _made(self, name: str, gradients: tuple[Tensor | None, ...]) -> None:
        # A layer that is computed again in backward (activation checkpointing) may hand its part over by itself.
        self._sums.setdefault(name, []).extend(sums(each) for each in gradients if each is not None)
