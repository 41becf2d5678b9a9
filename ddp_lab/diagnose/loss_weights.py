"""What one element of a loss, such as a token, weighs in the gradient: read off the backward pass, so it is exact.

A loss function's result, divided by the sum of the losses of its elements, is what each element has in it: 1 / n of a
mean over n. Multiplied by the gradient of the result, which arrives in backward, it is the element's weight in the
step. So it is for the loss functions of torch.nn.functional, and for `Tensor.mean`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_lab.diagnose.recorder import Recorder, site, wrap

_ALIKE = 0.01
_FUNCTIONS = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


class LossWeights:
    """Writes an event `loss` for each result of a loss function that a backward pass has reached.

    In an evaluation it writes an event `figure` for each mean over a batch's elements.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.calls: Counter[str] = Counter()
        """By line, how often a loss was computed there since the last backward pass."""
        self.is_evaluating = False
        self.backwards = 0
        """How many backward passes this step has had; the tracer counts them."""

    def install(self) -> None:
        """Wrap the loss functions and `Tensor.mean`."""
        for name in _FUNCTIONS:
            wrap(functional, name, self._loss)
        wrap(Tensor, "mean", self._mean)

    def _mean(self, function: Callable[..., Tensor], tensor: Tensor, *words: Any, **named: Any) -> Tensor:
        result = function(tensor, *words, **named)
        if not words and not named and tensor.numel() > 1:
            self._watch("mean", result, tensor.numel(), 1 / tensor.numel())
        return result

    def _loss(self, function: Callable[..., Tensor], *words: Any, **named: Any) -> Tensor:
        result = function(*words, **named)
        # Of elements that have weights of their own, none is an ordinary one.
        weighted = len(words) > 2 or any(named.get(each) is not None for each in ("weight", "pos_weight"))
        if weighted or not isinstance(result, Tensor):
            return result
        with torch.no_grad():
            each = result if result.dim() else function(*words, **{**named, "reduction": "none"})
        share = 1.0 if result.dim() else float(result.detach().double() / each.double().sum())
        if each.dim() and isfinite(share):
            self._watch(function.__name__, result, int(each.count_nonzero()), share)
        return result

    def _watch(self, name: str, result: Tensor, elements: int, share: float) -> None:
        where = site() or "?"
        if not (result.requires_grad and torch.is_grad_enabled()):
            if self.is_evaluating and not result.dim() and 0 < share < 1:
                self._recorder.write("figure", site=where, value=float(result), elements=round(1 / share))
            return
        call = self.calls[where]
        self.calls[where] += 1

        def arrived(gradient: Tensor) -> None:
            count, weights = elements, gradient.detach().double().reshape(-1) * share
            if gradient.dim():  # a loss for each element: those that count have a gradient
                weights = weights[weights != 0]
                if not len(weights) or weights.max() - weights.min() > _ALIKE * weights.abs().max():
                    return
                count = len(weights)
            self._recorder.write(
                "loss",
                **{"site": where, "call": call, "function": name, "elements": count},
                **{"weight": float(weights.mean()), "micro": self.backwards},
            )

        result.register_hook(arrived)
