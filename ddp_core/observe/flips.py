"""Single bits flipped on purpose in what a model trains, as a machine does that computes or remembers wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ddp_core.base.torch_internals import sent_together

_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_weight(model: nn.Module) -> None:
    """Flip one bit of the last trained parameter; of this rank's part where it is cut."""
    # Through `.data`, because torch counts other writes, and a memory that loses a bit counts nothing.
    weight = _last_trained(model).data
    part = weight.to_local() if hasattr(weight, "to_local") else weight
    part.copy_(with_flipped_bit(part))


def flip_gradients(model: nn.Module, strikes: Callable[[], bool]) -> Callable[[], None]:
    """From now on ask `strikes` in every backward whether to flip one bit of the last trained parameter's gradient.

    Call what is returned to end it. Other replicas of the model, which share the hooks on its weights, are not hit.
    """

    def changed(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return tuple(map(with_flipped_bit, gradients)) if strikes() else None

    # Not on the parameter: its hooks are also those of the other replicas.
    node = get_gradient_edge(_gets_gradient(model)).node
    hook = node.register_prehook(changed)

    def end(_kept_with_its_hooks: Node = node) -> None:
        hook.remove()

    return end


@torch.no_grad()
def with_flipped_bit(tensor: Tensor) -> Tensor:
    """A copy in which the element that is largest, whatever its sign, has the highest bit of its fraction flipped.

    So the number stays finite, and no sum with others swallows the change.
    """
    copy = tensor.detach().clone()
    if not copy.numel():
        return copy
    numbers = torch.view_as_real(copy) if copy.is_complex() else copy
    place = torch.unravel_index(numbers.abs().argmax(), numbers.shape)
    bit = round(-math.log2(torch.finfo(numbers.dtype).eps)) - 1
    one = numbers[place].reshape(1).view(_NUMBERS[numbers.element_size()])
    numbers[place] = (one ^ (1 << bit)).view(numbers.dtype)[0]
    return copy


def _last_trained(model: nn.Module) -> nn.Parameter:
    return [parameter for parameter in model.parameters() if parameter.requires_grad][-1]


def _gets_gradient(model: nn.Module) -> Tensor:
    """The last trained parameter; with --shard parameters the whole of it, while the model has this rank's part."""
    last = _last_trained(model)
    if not hasattr(last, "to_local"):
        return last
    from torch.distributed.fsdp import FSDPModule

    parts = (part for part in model.modules() if isinstance(part, FSDPModule))
    return next(whole for part in parts for own, whole in sent_together(part) if own is last)
