"""Whether an optimizer treats each element of a parameter by itself, found out by an update in pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.reduction.norm import BLOCK

_SHAPE = (11, 500)
"""Of the tensor that is tried: two dimensions, several blocks, and no multiple of a vector's length."""
_CUTS = (BLOCK, 3 * BLOCK)
_STEPS = 2
"""The second one uses the state that the first has made."""


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Update a small tensor as a whole and in pieces, as the optimizer would in each of its parameter groups.

    The optimizer, its parameters and its state stay as they are. Raises UserError (2) where the bits differ, or where
    the update fails.
    """
    for group in optimizer.param_groups:
        for like in _kinds(group):
            _try(optimizer, group, like)


def per_element(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """Which entries of a parameter's state have a number for each element, in a parameter group that is elementwise."""
    found: set[str] = set()
    for like in _kinds(group):
        ones = torch.ones(_SHAPE, dtype=like.dtype, device=like.device)
        trial = _Trial(optimizer, group, like, [nn.Parameter(ones.clone())])
        trial.step([ones])
        (state,) = trial.states()
        found |= {name for name, value in state.items() if isinstance(value, Tensor) and value.shape == _SHAPE}
    return found


def _kinds(group: dict[str, Any]) -> list[Tensor]:
    """The largest trained parameter of each dtype and device in a parameter group."""
    trained = sorted((each for each in group["params"] if each.requires_grad), key=Tensor.numel)
    return list({(each.dtype, each.device): each for each in trained}.values())


def _try(optimizer: torch.optim.Optimizer, group: dict[str, Any], like: Tensor) -> None:
    kind = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = (
        torch.randn(_SHAPE, generator=generator).to(like.device, like.dtype) for _ in range(1 + _STEPS)
    )
    whole = _Trial(optimizer, group, like, [nn.Parameter(weights.clone())])
    parts = _Trial(optimizer, group, like, [nn.Parameter(part.clone()) for part in _cut(weights)])
    try:
        for gradient in gradients:
            whole.step([gradient.clone()])
            parts.step([part.clone() for part in _cut(gradient)])
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{kind} cannot update a parameter in pieces ({reason}): {_ADVICE}") from error
    for name, entire, cut in whole.compared_with(parts):
        if not _equal(entire, cut):
            raise UserError(
                f"{kind} does not treat each element by itself ({name} has other bits in pieces): {_ADVICE}"
            )


_ADVICE = (
    "without shards (--shard none) it can be used, and with them SGD, Adam, AdamW, RMSprop, Adagrad and their like"
)


def _cut(tensor: Tensor) -> list[Tensor]:
    return list(torch.tensor_split(tensor.view(-1), _CUTS))


def _equal(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether parts have the values of a whole, one after the other, or each has the whole's one value."""
    if not isinstance(whole, Tensor) or whole.shape != _SHAPE:
        return all(_same(part, whole) for part in parts)
    flat = [part for part in parts if isinstance(part, Tensor) and part.dim() == 1]
    return len(flat) == len(parts) and _same(torch.cat(flat), whole.view(-1))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # By bytes, since NaN equals nothing.
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))
    return type(one) is type(other) and bool(one == other)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _Trial:
    """A copy of an optimizer with one parameter group, over other parameters, whose steps call no hooks."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], like: Tensor, parameters: list[nn.Parameter]
    ) -> None:
        self._parameters = parameters
        self._optimizer: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(self._optimizer).update(vars(optimizer))
        self._optimizer.param_groups = [{**group, "params": parameters}]
        self._optimizer.state = defaultdict(dict)
        state = optimizer.state.get(like, {})
        for parameter in parameters:
            # Some optimizers make their state when they are made.
            made = {name: _resized(value, like, parameter) for name, value in state.items()}
            if made:
                self._optimizer.state[parameter] = made

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update the parameters."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        step: Any = type(self._optimizer).step
        if hasattr(step, "hooked"):
            step = step.__wrapped__  # without what torch wraps around it to call hooks
        step(self._optimizer)

    def states(self) -> list[dict[str, Any]]:
        """The state of each parameter."""
        return [self._optimizer.state[parameter] for parameter in self._parameters]

    def compared_with(self, parts: _Trial) -> list[tuple[str, Any, list[Any]]]:
        """The parameter and what its state holds: by name, of this trial of a whole, and of each of the parts."""
        (state,) = self.states()
        names = {name for each in [state, *parts.states()] for name in each}
        return [
            ("the parameter", self._parameters[0].detach(), [part.detach() for part in parts._parameters]),
            *((name, state.get(name), [each.get(name) for each in parts.states()]) for name in sorted(names)),
        ]


def _resized(value: Any, like: Tensor, parameter: Tensor) -> Any:
    """A value of the state of `like` for `parameter`: every element as the first one was."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != like.shape or like.dim() == 0:
        return value.clone()
    return value.flatten()[:1].expand(parameter.numel()).clone().view(parameter.shape)
