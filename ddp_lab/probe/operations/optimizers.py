"""Three updates of a few parameters by each of torch's optimizers, in each of its implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn, optim

from ddp_lab.probe.operations.inputs import Operations, numbers

_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def optimizers() -> Operations:
    """The optimizers by name."""
    fusable: dict[str, Callable[..., optim.Optimizer]] = {
        "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        "Adam": partial(optim.Adam, lr=0.01),
        "AdamW": partial(optim.AdamW, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
        "Adagrad": partial(optim.Adagrad, lr=0.01),
    }
    others: dict[str, Callable[..., optim.Optimizer]] = {
        "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9),
        "Adadelta": optim.Adadelta,
        "Adamax": optim.Adamax,
        "NAdam": optim.NAdam,
        "RAdam": optim.RAdam,
        "Rprop": optim.Rprop,
        "ASGD": optim.ASGD,
    }
    return {
        **{
            f"{name} {how}": partial(updated, partial(make, **settings))
            for name, make in fusable.items()
            for how, settings in _IMPLEMENTATIONS.items()
            if not (name == "Adagrad" and how == "fused")
        },
        **{f"{name} loop": partial(updated, partial(make, foreach=False)) for name, make in others.items()},
        "moving average of weights": _averaged,
    }


def updated(make: Callable[[Iterable[nn.Parameter]], optim.Optimizer]) -> list[Any]:
    """The parameters and the optimizer's states after three updates."""
    parameters = [nn.Parameter(numbers(size, key=size)) for size in (1, 37, 1000)]
    optimizer = make(parameters)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = numbers(*parameter.shape, key=10 + step)
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*(parameter.detach() for parameter in parameters), *states]


def _averaged() -> Tensor:
    average = numbers(1003)
    for step in range(3):
        average.lerp_(numbers(1003, key=step), 0.001)
    return average
