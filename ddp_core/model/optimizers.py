"""The optimizer over a model's parameters: makes the built-in ones, and checks what an experiment's file has built."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_core.base.errors import UserError
from ddp_core.checkpoint.parts import shapes_of
from ddp_core.checkpoint.state import without_queues
from ddp_core.config.experiment import Optimizer


def load_for_optimizers() -> None:
    """Load what the first optimizer of a process loads, which takes as long as torch itself; computes nothing."""
    torch.optim.SGD([torch.zeros(1)])


def build_optimizer(
    settings: Optimizer, model: nn.Module, global_batch_size: int | None = None
) -> torch.optim.Optimizer:
    """The built-in optimizer over the model's trainable parameters, on the device that they are on.

    Its learning rate is `settings.base_rate(global_batch_size)`, or `settings.lr` where no batch size is given.
    """
    rate = settings.lr if global_batch_size is None else settings.base_rate(global_batch_size)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = implementation(settings, parameters)
    common: dict[str, Any] = {
        "lr": rate,
        "weight_decay": settings.weight_decay,
        "foreach": chosen == "foreach",
        "fused": chosen == "fused",
    }
    optimizer: torch.optim.Optimizer
    if settings.name == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=settings.momentum, nesterov=settings.nesterov, **common)
    else:
        kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
        optimizer = kind(parameters, betas=settings.betas, eps=settings.eps, **common)
    strided = [parameter for parameter in parameters if not parameter.is_contiguous()]
    if chosen == "fused" and strided:
        optimizer.register_step_pre_hook(partial(_lay_out_like_parameters, strided))
    return optimizer


def require_trains(optimizer: Any, model: nn.Module, name: str, is_rate_set: bool) -> None:
    """Check what the experiment's own function returned for `model`; `name` is how a message calls that function.

    Raises UserError unless it is a torch optimizer that needs no closure, has each trainable parameter of the model in
    exactly one group and no other tensor, has a learning rate in each group where a schedule sets rates (`is_rate_set`;
    elsewhere a group without a rate gets the rate 1, which its optimizer does not read), and a state that can be saved.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"{name} returned a {type(optimizer).__name__}; it returns a torch.optim.Optimizer over the "
            "model's parameters"
        )
    what = f"{name} returned a {type(optimizer).__name__}"
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"{what}, whose step calls a closure: it would compute several gradients for one batch; use an optimizer "
            "that takes the gradients as they are"
        )
    names = {id(parameter): path for path, parameter in model.named_parameters()}
    found = Counter(id(tensor) for group in optimizer.param_groups for tensor in group["params"])
    for number, group in enumerate(optimizer.param_groups):
        strangers = [tensor for tensor in group["params"] if id(tensor) not in names]
        if strangers:
            raise UserError(
                f"{what} with a tensor of shape {list(strangers[0].shape)} in group {number} that is no parameter of "
                "the model: build it from the model that the function is given"
            )
        if "lr" not in group and is_rate_set:
            raise UserError(f"{what}, whose group {number} has no `lr` for the schedule to set")
        group.setdefault("lr", 1.0)
    twice = [names[key] for key, count in found.items() if count > 1]
    if twice:
        raise UserError(f"{what} that has {twice[0]} more than once: put each parameter in one group")
    left_out = [path for path, each in model.named_parameters() if each.requires_grad and id(each) not in found]
    if left_out:
        more = f" and {len(left_out) - 1} others" if len(left_out) > 1 else ""
        raise UserError(
            f"{what} without {left_out[0]}{more}, which would never be trained: add it to a group, or freeze it with "
            "requires_grad_(False) in the model's function"
        )
    require_saveable(without_queues(optimizer.state_dict()), what)


def require_saveable(state: Any, what: str) -> None:
    """Raises UserError where a checkpoint could not hold this state."""
    try:
        shapes_of(state)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} that no checkpoint can hold: {error}") from None


def implementation(settings: Optimizer, parameters: Sequence[Tensor]) -> Literal["fused", "foreach", "loop"]:
    """The implementation that is used for these parameters: the same on every rank, as the parameters are."""
    fit = (parameter.is_floating_point() and fills_its_memory(parameter) for parameter in parameters)
    if settings.implementation == "fused" and all(fit):
        return "fused"
    # On CPU foreach gives the same bits, but each operation runs over all tensors before the next: the cache is cold.
    if settings.implementation == "foreach" and any(parameter.is_cuda for parameter in parameters):
        return "foreach"
    return "loop"


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie without gaps or overlaps: torch keeps such strides, and no others."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


@torch.no_grad()
def _lay_out_like_parameters(
    parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> None:
    """Give gradients and optimizer states with other strides those of their parameters; called before each step.

    Fused kernels walk parameter, gradient and states by address. Where strides differ, the kernels of the CPU silently
    mix up elements (aten/src/ATen/native/cpu/FusedSGDKernel.cpp), and those of CUDA raise (check_fast_path_restrictions
    in aten/src/ATen/native/ForeachUtils.h). Autograd's gradients have the strides of their parameters; gradients that a
    model sets by itself, and states from a checkpoint, may have others.
    """
    for parameter in parameters:
        if parameter.grad is not None and not same_layout(parameter, parameter.grad):
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and not same_layout(parameter, value):
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Whether equal indices lie at equal places in the memory of two tensors of one shape."""
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    # The stride of a dimension with one element means nothing.
    return all(ours == theirs for size, ours, theirs in strides if size > 1)


def require_schedules(schedule: Any, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Check what the experiment's own function returned for `optimizer`; `name` is how a message calls that function.

    Raises UserError unless it is a scheduler of torch for this optimizer that needs nothing but the number of steps,
    and has a state that can be saved.
    """
    if not isinstance(schedule, LRScheduler):
        raise UserError(
            f"{name} returned a {type(schedule).__name__}; it returns a torch.optim.lr_scheduler.LRScheduler"
        )
    what = f"{name} returned a {type(schedule).__name__}"
    if isinstance(schedule, ReduceLROnPlateau):
        raise UserError(
            f"{what}, which waits for a loss to stop falling; a schedule here is moved on after every update and sees "
            "no loss: use one that depends on the step alone"
        )
    if schedule.optimizer is not optimizer:
        raise UserError(f"{what} for another optimizer: build it from the optimizer that the function is given")
    require_saveable(without_queues(schedule.state_dict()), what)
