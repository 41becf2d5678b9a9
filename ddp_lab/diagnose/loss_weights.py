"""What one element of a loss, such as a token, weighs in the gradient: read off the backward pass, so it is exact.

A mean of a loss function over n elements whose result is multiplied by w on its way to `backward` gives each element
the weight w / n. Of the loss functions of torch.nn.functional, and of `Tensor.mean`, the n is counted when they are
called, and w arrives as the gradient of their result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_lab.diagnose.recorder import Recorder, site

_ALIKE = 0.01
_FUNCTIONS = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


class LossWeights:
    """Writes an event `loss` for each result of a loss function that a backward pass has reached."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: Counter[str] = Counter()
        self.backwards = 0
        """How many backward passes this step has had; the tracer counts them."""

    def install(self) -> None:
        """Wrap the loss functions and `Tensor.mean`."""
        for name in _FUNCTIONS:
            setattr(functional, name, self._wrapped(name, getattr(functional, name)))
        mean = torch.Tensor.mean

        @wraps(mean)
        def traced(tensor: Tensor, *words: Any, **named: Any) -> Tensor:
            result = mean(tensor, *words, **named)
            if not words and not named and tensor.numel() > 1 and result.requires_grad:
                self._watch("mean", result, tensor.numel(), tensor.numel())
            return result

        torch.Tensor.mean = traced  # type: ignore[assignment,method-assign]

    def new_backward(self) -> None:
        """A backward pass begins: the calls after it are counted anew."""
        self._calls.clear()

    def _wrapped(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        parameters = signature(function)

        @wraps(function)
        def traced(*words: Any, **named: Any) -> Tensor:
            result = function(*words, **named)
            if isinstance(result, Tensor) and result.requires_grad and torch.is_grad_enabled():
                given = parameters.bind(*words, **named)
                given.apply_defaults()
                if (elements := _elements(given.arguments)) is not None:
                    is_sum = given.arguments.get("reduction") == "sum" or given.arguments.get("size_average") is False
                    self._watch(name, result, elements, 1 if is_sum else elements)
            return result

        return traced

    def _watch(self, name: str, result: Tensor, elements: int, divisor: int) -> None:
        where = site() or "?"
        call = self._calls[where]
        self._calls[where] += 1

        def arrived(gradient: Tensor) -> None:
            count, weight = elements, float(gradient.detach().double().mean()) / max(1, divisor)
            if gradient.dim():  # a loss for each element: those that count have a gradient
                weights = gradient.detach().double()
                weights = weights[weights != 0]
                if not len(weights) or weights.max() - weights.min() > _ALIKE * weights.abs().max():
                    return
                count, weight = len(weights), float(weights.mean())
            self._recorder.write(
                "loss", site=where, call=call, function=name, elements=count, weight=weight, micro=self.backwards
            )

        result.register_hook(arrived)


def _elements(given: dict[str, Any]) -> int | None:
    """Over how many elements the function goes; None where they have weights of their own."""
    if given.get("weight") is not None or given.get("pos_weight") is not None:
        return None
    target = given["target"]
    if "ignore_index" not in given:
        return int(target.numel())
    if not target.is_floating_point():
        return int((target != given["ignore_index"]).sum())
    # Targets that are probabilities of classes: the second dimension, or the only one, has the classes.
    return int(target.numel() // max(1, target.shape[min(1, target.dim() - 1)]))
