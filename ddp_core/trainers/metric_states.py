"""Metrics of torchmetrics in an evaluation: the same figure on every layout, as from one process over the same batches.

Each batch is counted by a copy of the metric that has seen nothing else, so nothing is left of other batches and other
evaluations. Afterwards the copies' states are merged in the sequence of the batches, each by its own reduction, as
torchmetrics does with those of ranks. torchmetrics itself sends nothing: it would have ranks wait for each other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_core.base.digests import checksum
from ddp_core.base.errors import UserError
from ddp_core.base.seeds import generators_kept
from ddp_core.base.trees import map_tensors, tensors_of
from ddp_core.base.user_code import user_code
from ddp_core.distributed.process_group import Collectives

if TYPE_CHECKING:
    from torchmetrics import Metric

_ACROSS_BATCHES = {"Running": "the last few batches", "MinMaxMetric": "all evaluations until now"}
"""Metrics whose figures follow from how they were called before, and over what they look."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
_TORCHS = vars(nn.Module())
"""Attributes that torch keeps itself."""
_SAME = 1e-3
"""How far, relatively, figures of a few samples may be apart that were added up in another sequence."""
_WAY_OUT = "write a function that returns sums, with a `finish`, in its place"

_State = tuple[str, str]
"""The place of a metric in another one that is made of several, empty for itself, and the name of a state of it."""


@dataclass
class _Seen:
    """What the copies of one metric have gathered on this rank."""

    reductions: dict[_State, str] = field(default_factory=dict)
    states: dict[_State, dict[int, Any]] = field(default_factory=dict)
    """By batch; whole numbers that are summed lie at the first batch, since their sum is the same in any sequence."""
    attributes: dict[str, str] = field(default_factory=dict)
    """What a copy has beside its states, as texts; the same after each batch."""


class MetricStates:
    """Gathers the states of metrics over the evaluation batches that this rank computes.

    With `compared`, each metric must also give the figure that it gives where one copy sees all batches.
    """

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device, compared: bool = False) -> None:
        with user_code("your metrics"):
            self._fresh = {name: _copy(metric).to(device) for name, metric in metrics.items()}
            self._in_turn = {name: _copy(metric) for name, metric in self._fresh.items()} if compared else {}
        self._device = device
        self._seen = {name: _Seen() for name in metrics}
        self._first: dict[str, Metric] = {}
        """The copies that have seen the first batch of all, where this rank has it."""

    def add(self, batch: int, outputs: Any, targets: Any) -> None:
        """Count one batch. Raises UserError where the states of a metric cannot be merged."""
        for name, fresh in self._fresh.items():
            with user_code("your metrics"):
                if name in self._in_turn:
                    with generators_kept(self._device):
                        self._in_turn[name].update(outputs, targets)
                metric = _copy(fresh)
                metric.update(outputs, targets)
            self._keep(name, batch, metric)
            if batch == 0:
                self._first[name] = metric

    def figures(self, collectives: Collectives) -> Callable[[], dict[str, Any]]:
        """Gather the states of all ranks, and return what computes the figures from them on rank 0."""
        told = {
            name: (seen.reductions, map_tensors(Tensor.cpu, seen.states), seen.attributes)
            for name, seen in self._seen.items()
        }
        everyones = collectives.gather(told)
        merged = {name: _merged(name, [_Seen(*theirs[name]) for theirs in everyones]) for name in self._fresh}
        compute = self._compared if self._in_turn else self._computed
        return lambda: {name: compute(name, states) for name, states in merged.items()}

    def _computed(self, name: str, states: Mapping[_State, Any]) -> Any:
        with user_code("your metrics"):
            metric = self._first[name].to("cpu")
            for place, part in _parts(metric):
                for state in part._reductions:
                    setattr(part, state, states[place, state])
            return metric.compute()

    def _compared(self, name: str, states: Mapping[_State, Any]) -> Any:
        """The figure, or None where so few samples have none. Raises UserError where it is another without a merge."""
        in_turn = self._in_turn[name].to("cpu")
        try:
            with generators_kept(), user_code("your metrics"):
                expected = in_turn.compute()
        except Exception:
            return None
        try:
            with generators_kept():
                found = self._computed(name, states)
        except Exception as error:
            raise _refusal(name, in_turn, f"{type(error).__name__}: {error}") from error
        if not _nearly_same([*tensors_of(found)], [*tensors_of(expected)]):
            raise _refusal(name, in_turn, f"it gives {found}, and {expected} where one object counts all batches")
        return found

    def _keep(self, name: str, batch: int, metric: Metric) -> None:
        reductions: dict[_State, str] = {}
        states: dict[_State, Any] = {}
        attributes: dict[str, str] = {}
        for place, part in _parts(metric):
            for kind in type(part).__mro__:
                if kind.__module__.startswith("torchmetrics.") and (over := _ACROSS_BATCHES.get(kind.__name__)):
                    raise _refusal(name, part, f"it looks at {over}")
            for state, reduction in part._reductions.items():
                reductions[place, state] = _reduction(name, part, state, reduction)
                states[place, state] = map_tensors(lambda tensor: tensor.detach().clone(), getattr(part, state))
            others = _plain_attributes(part, besides={*part._reductions, "_update_count"})
            attributes |= {f"{place}.{key}".lstrip("."): text for key, text in others}
        if not states:
            raise _refusal(name, metric, "it has no state (add_state) that could be")
        seen = self._seen[name]
        if not seen.states:
            seen.reductions, seen.attributes = reductions, attributes
        _require_same(name, seen, reductions, attributes)
        for key, value in states.items():
            by_batch = seen.states.setdefault(key, {})
            first = next(iter(by_batch.values()), None)
            is_whole = reductions[key] == "sum" and value.dtype == torch.int64
            if is_whole and first is not None and first.shape == value.shape:
                first += value
            else:
                by_batch[batch] = value


def _copy(metric: Metric) -> Metric:
    """A copy with states of its own, which asks no other rank; the weights of a network within are shared."""
    copy = deepcopy(metric, {id(each): each for each in metric.parameters()})
    for _, part in _parts(copy):
        part.distributed_available_fn = lambda: False
    return copy


def _parts(metric: Metric) -> Iterator[tuple[str, Metric]]:
    """The metric and those that it is made of, each with its place."""
    from torchmetrics import Metric

    for place, part in metric.named_modules():
        if isinstance(part, Metric):
            yield place, part


def _plain_attributes(part: Metric, besides: Collection[str]) -> Iterator[tuple[str, str]]:
    """Names of attributes that are numbers, words or tensors, or lists of these, and texts that tell their values."""
    for name, value in vars(part).items():
        values = value if isinstance(value, list | tuple) else [value]
        if name not in besides and name not in _TORCHS and all(isinstance(each, _PLAIN) for each in values):
            texts = [checksum(each) if isinstance(each, Tensor) else repr(each) for each in values]
            yield name, texts[0] if values is not value and texts else str(texts)


def _reduction(name: str, part: Metric, state: str, reduction: Any) -> str:
    """How values of a state are merged. Raises UserError where that is not known."""
    from torchmetrics.utilities import data

    default = part._defaults[state]
    if isinstance(default, list):
        if reduction in (None, data.dim_zero_cat):
            return "list"
    elif reduction is None:
        return "stack"
    elif (how := str(getattr(reduction, "__name__", "")).removeprefix("dim_zero_")) in _MERGES:
        if how == "sum" and default.any():
            raise _refusal(name, part, f"its state {state} is summed, and does not begin at 0")
        if reduction is getattr(data, f"dim_zero_{how}"):
            return how
    raise _refusal(name, part, f"its state {state} has a reduction of its own")


def _require_same(name: str, seen: _Seen, reductions: dict[_State, str], attributes: dict[str, str]) -> None:
    if reductions != seen.reductions:
        raise UserError(f"metrics: {name} has other states after one batch than after another; {_WAY_OUT}")
    for key in {**attributes, **seen.attributes}:
        ours, theirs = attributes.get(key), seen.attributes.get(key)
        if ours != theirs:
            raise UserError(
                f"metrics: {name} keeps something outside of its states: {key} is {ours} after one batch and {theirs} "
                "after another; keep it in a state (add_state) with a reduction"
            )


def _merged(name: str, everyones: list[_Seen]) -> dict[_State, Any]:
    """Each state over all batches, in their sequence."""
    everyones = [seen for seen in everyones if seen.states]
    merged = {}
    for seen in everyones:
        _require_same(name, everyones[0], seen.reductions, seen.attributes)
    for key, how in everyones[0].reductions.items():
        by_batch = {batch: value for seen in everyones for batch, value in seen.states[key].items()}
        values = [by_batch[batch] for batch in sorted(by_batch)]
        shapes = dict.fromkeys(tuple(value.shape) for value in values if how not in ("list", "cat"))
        if len(shapes) > 1:
            sizes = " and ".join(str(list(shape)) for shape in shapes)
            raise UserError(f"metrics: {name} has a state {key[1]} of the shapes {sizes}, which cannot be merged")
        merged[key] = [each for value in values for each in value] if how == "list" else _MERGES[how](values)
    return merged


def _nearly_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    if [each.shape for each in ours] != [each.shape for each in theirs]:
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(one.double(), other.double(), rtol=_SAME, equal_nan=True) for one, other in pairs)


def _refusal(name: str, part: Metric, why: str) -> UserError:
    return UserError(f"metrics: {name} ({type(part).__name__}) cannot be merged over batches: {why}; {_WAY_OUT}")


_MERGES: Mapping[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda values: reduce(operator.add, values),
    "mean": lambda values: reduce(operator.add, values) / len(values),
    "max": lambda values: reduce(torch.maximum, values),
    "min": lambda values: reduce(torch.minimum, values),
    "cat": torch.cat,
    "stack": lambda values: torch.stack(values) if len(values) > 1 else values[0],
}
"""One tensor from those of the batches, one operation after the other, so that no number of threads counts."""
