"""Which modules of a model are gathered and freed as one, where every rank keeps a part of each parameter only."""

from __future__ import annotations

from collections import Counter

from torch import nn

FEWEST_ELEMENTS = 64 * 1024
"""A block with fewer elements costs more in messages than its memory is worth."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(module: nn.Module, fewest_elements: int = FEWEST_ELEMENTS) -> list[nn.Module]:
    """The blocks of a model, in the sequence of its modules: the repeated parts that deep models are made of.

    A block is a module that stands in a ModuleList, a ModuleDict or a Sequential, is none of these itself, has
    `fewest_elements` elements or more, and shares no parameter with a module outside of it. Blocks do not lie within
    blocks. What belongs to no block stays with the model itself, which is gathered for the whole of a pass.
    """
    uses, found = _uses(module), list[nn.Module]()

    def descend(parent: nn.Module) -> None:
        for child in parent.children():
            if not isinstance(parent, _CONTAINERS) or isinstance(child, _CONTAINERS):
                descend(child)
            elif child not in found and _elements(child) >= fewest_elements:
                inside = _uses(child)
                if all(inside[parameter] == uses[parameter] for parameter in inside):
                    found.append(child)

    descend(module)
    return found


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How often each parameter is registered in the module and what it consists of."""
    own = (part.named_parameters(recurse=False, remove_duplicate=False) for part in module.modules())
    return Counter(parameter for parameters in own for _, parameter in parameters)


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
