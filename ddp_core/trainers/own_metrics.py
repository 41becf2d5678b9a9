"""The experiment's own metrics: functions whose sums count, perhaps with a `finish`, and metrics of torchmetrics."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.distributed.process_group import Collectives
from ddp_core.trainers.metric_states import MetricStates

if TYPE_CHECKING:
    from torchmetrics import Metric

_TAKEN = ("loss", "accuracy")  # names of figures that every evaluation has

NamedMetric = Callable[..., Any]
"""`metric(outputs, targets)` returns what is added up over the batches: (sum, count), a total, or a dict of these."""


class _Name(NamedTuple):
    """The name of a metric, empty for the function `metrics`, and the key of a figure in the dict that it returns."""

    metric: str
    key: str

    def __str__(self) -> str:
        return "_".join(filter(None, self))


_Kinds = dict[_Name, str]
"""For each name, in words, which kind of number its total is, or its sum and its count, and their shapes."""


@dataclass(frozen=True)
class OwnMetrics:
    """The metrics of an experiment file by name; that of the function `metrics` is empty."""

    names: Sequence[str]
    functions: Mapping[str, NamedMetric]
    of_torchmetrics: Mapping[str, Metric]
    are_tried: bool = False
    """Whether metrics of torchmetrics are compared with what they give without a merge."""

    @classmethod
    def of(cls, own: Any) -> OwnMetrics | None:
        """What the name `metrics` stands for in a file: a function, a dict of metrics by name, or torchmetrics' own.

        None where it stands for nothing. Raises UserError for anything else.
        """
        if own is None:
            return None
        library = sys.modules.get("torchmetrics")  # without it nothing can be of it
        named: Mapping[str, Any] = own if isinstance(own, Mapping) else {"": own}
        if library is not None and isinstance(own, library.MetricCollection):
            named = dict(own.items())
        elif library is not None and isinstance(own, library.Metric):
            named = {type(own).__name__: own}
        for name, metric in named.items():
            if not isinstance(name, str):
                raise UserError(f"metrics names a metric {name!r}; a name is a str")
            if isinstance(metric, type) or not callable(metric):
                what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
                raise UserError(
                    f"metrics: {name or 'metrics'} is {what}; it is a function of outputs and targets, an object that "
                    "can be called like one, or a metric of torchmetrics"
                )
        states = {name: each for name, each in named.items() if library and isinstance(each, library.Metric)}
        functions = {name: each for name, each in named.items() if name not in states}
        return cls(list(named), functions, states)


class NamedSums:
    """Adds up the figures of the evaluation batches that this rank computes, exactly, whoever computes which batch.

    Whole numbers are added as int64, which is exact in any sequence. Floating-point numbers are kept for each batch, so
    that `math.fsum` rounds once. Those on a GPU are read when all batches are done, so that the host waits for none.
    """

    def __init__(self, metrics: Mapping[str, NamedMetric]) -> None:
        self._metrics = metrics
        self._kinds: _Kinds | None = None
        self._parts: dict[tuple[_Name, int], list[Tensor]] = {}
        """The parts of each total, or sum or count: one for each batch, or a single one where it is a whole number."""

    def add(self, outputs: Any, targets: Any) -> None:
        """Add the figures of one batch. Raises UserError where a function returns something else than it should."""
        found: dict[_Name, tuple[Tensor, ...]] = {}
        for metric, function in self._metrics.items():
            with user_code("your metrics"):
                values = function(outputs, targets)
            found |= {name: _parts(name, value) for name, value in _by_name(metric, values)}
        kinds: _Kinds = {name: " and ".join(map(_kind, parts)) for name, parts in found.items()}
        if self._kinds is not None:
            _require_same_kinds(self._kinds, kinds)
        self._kinds = kinds
        for name, parts in found.items():
            for number, part in enumerate(parts):
                before = self._parts.setdefault((name, number), [])
                if before and not part.is_floating_point():
                    before[0] = before[0] + part  # a number and a tensor on a GPU may meet here
                else:
                    before.append(part.clone())  # the function may go on to change its tensor

    def figures(self, collectives: Collectives) -> Callable[[], dict[str, Any]]:
        """Gather the parts of all ranks, and return what makes the figures of their sums.

        A mean, a total, or what the metric's own `finish` returns.
        """
        own = {key: torch.stack([part.cpu() for part in parts]) for key, parts in self._parts.items()}
        every = [each for each in collectives.gather((self._kinds, own)) if each[0] is not None]
        for kinds, _ in every[1:]:
            _require_same_kinds(every[0][0], kinds)

        def made() -> dict[str, Any]:
            sums: dict[_Name, list[Any]] = {}
            for key in sorted(every[0][1]) if every else ():
                sums.setdefault(key[0], []).append(_total(torch.cat([parts[key] for _, parts in every])))
            return {metric: self._finished(metric, function, sums) for metric, function in self._metrics.items()}

        return made

    def _finished(self, metric: str, function: NamedMetric, sums: Mapping[_Name, list[Any]]) -> Any:
        own = {name.key: parts for name, parts in sums.items() if name.metric == metric}
        finish = getattr(function, "finish", None)
        if finish is None:
            quotients = np.vectorize(_quotient, otypes=[object])
            figures = {key: quotients(*parts).tolist() for key, parts in own.items()}
            return figures.get("", figures)
        told = {key: _as_tensors(parts) for key, parts in own.items()}
        with user_code("your metrics"):
            return finish(told.get("", told))


class OwnFigures:
    """The own metrics of one evaluation; `add` is called for the batches that this rank computes."""

    def __init__(self, metrics: OwnMetrics, device: torch.device) -> None:
        self._names = metrics.names
        self._sums = NamedSums(metrics.functions)
        self._states = MetricStates(metrics.of_torchmetrics, device, metrics.are_tried)

    def add(self, batch: int, outputs: Any, targets: Any) -> None:
        """Count one batch. Raises UserError for a metric that cannot be counted batch by batch."""
        self._sums.add(outputs, targets)
        self._states.add(batch, outputs, targets)

    def all(self, collectives: Collectives) -> dict[str, Any]:
        """`test_<name>` of every figure, the same on every rank: numbers and nested lists, null where not finite.

        Rank 0 computes them from what all ranks have: on another kind of CPU a quotient of sums may have other bits.
        Raises there what a metric raises, and a UserError that says so on the other ranks.
        """
        of_sums, of_states = self._sums.figures(collectives), self._states.figures(collectives)
        figures: dict[str, Any] = {}
        problem: str | None = None
        try:
            if collectives.world.is_first:
                found = {**of_sums(), **of_states()}
                figures = _named({name: found[name] for name in self._names})
        except Exception as error:
            problem = _in_one_line(error)
            raise
        finally:
            figures, problem = collectives.broadcast((figures, problem))
        if problem is not None:
            raise UserError(f"rank 0 cannot compute the metrics: {problem}")
        return figures


def _in_one_line(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: {error}"


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures under their full names, as JSON has them. Raises UserError for a name that is taken."""
    if not isinstance(found.get("", {}), Mapping):
        raise UserError(f"finish of metrics returned a {type(found['']).__name__}; it returns a dict of name -> figure")
    figures: dict[str, Any] = {}
    for name, value in _flat("", found):
        if name in _TAKEN:
            raise UserError(f"metrics returned `{name}`, which every evaluation reports as test_{name}; rename it")
        if f"test_{name}" in figures:
            raise UserError(f"two metrics give test_{name}; rename one")
        figures[f"test_{name}"] = value
    return figures


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat("_".join(filter(None, (name, str(key)))), inner)
    else:
        yield name, _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    raise UserError(f"metrics: {name} is a {type(value).__name__}; a figure is a number, a tensor, or a dict of them")


def _total(parts: Tensor) -> Any:
    """The sum of these parts, an array of Python's numbers."""
    shape, columns = parts.shape[1:], parts.view(len(parts), -1 if parts.numel() else 0).T.tolist()
    add = math.fsum if parts.is_floating_point() else sum
    return np.array([add(column) for column in columns], dtype=object).reshape(shape)


def _by_name(metric: str, found: Any) -> Iterator[tuple[_Name, Any]]:
    """What a metric returned, by the names of its figures."""
    if not isinstance(found, Mapping):
        if not metric:
            raise UserError(
                f"metrics returned a {type(found).__name__}; "
                "it returns a dict of name -> (sum, count) or name -> tensor"
            )
        yield _Name(metric, ""), found
        return
    for key, value in found.items():
        if not isinstance(key, str) or not key:
            raise UserError(f"{metric or 'metrics'} returned a figure named {key!r}; a name is a str")
        yield _Name(metric, key), value


def _parts(name: _Name, value: Any) -> tuple[Tensor, ...]:
    """The total of a figure, or its sum and count, in int64 or float64, on the device where the function left them."""
    parts = tuple(_number(name, part) for part in (value if isinstance(value, tuple | list) else (value,)))
    if isinstance(value, tuple | list) and len(parts) != 2:
        raise UserError(f"metrics: {name} has {len(parts)} parts; it is a pair (sum, count) or one tensor")
    if len(parts) == 2 and parts[1].shape not in (parts[0].shape, torch.Size()):
        raise UserError(
            f"metrics: {name} has a sum of shape {list(parts[0].shape)} and a count of shape {list(parts[1].shape)}; "
            "the count is one number, or has the sum's shape"
        )
    return parts


def _number(name: _Name, part: Any) -> Tensor:
    if isinstance(part, int | float):
        return torch.tensor(part, dtype=torch.float64 if isinstance(part, float) else torch.int64)
    if not isinstance(part, Tensor) or part.is_complex():
        kind = str(part.dtype) if isinstance(part, Tensor) else type(part).__name__
        raise UserError(f"metrics: {name} is a {kind}; it is a tensor, a number, or a pair of them (sum, count)")
    return part.detach().to(torch.float64 if part.is_floating_point() else torch.int64)


def _require_same_kinds(ours: _Kinds, theirs: _Kinds) -> None:
    if ours.keys() != theirs.keys():
        names, others = (", ".join(sorted(map(str, kinds))) for kinds in (ours, theirs))
        raise UserError(
            f"metrics returned {names} for one batch and {others} for another; return the same names for every batch"
        )
    for name, kinds in ours.items():
        if kinds != theirs[name]:
            raise UserError(
                f"metrics: {name} is {kinds} for one batch and {theirs[name]} for another; sum "
                "over the samples, so that the shape does not depend on their number"
            )


def _kind(part: Tensor) -> str:
    return f"{'float' if part.is_floating_point() else 'int'} {list(part.shape)}"


def _quotient(total: float, count: float | None = None) -> float | None:
    """The total, or sum / count; None where nothing was counted."""
    return None if count == 0 else total if count is None else total / count


def _as_tensors(parts: list[Any]) -> Tensor | tuple[Tensor, ...]:
    """A total, or a sum and its count, as float64 on the CPU, in which a division by zero is no error."""
    tensors = tuple(torch.tensor(part.tolist(), dtype=torch.float64) for part in parts)
    return tensors if len(tensors) > 1 else tensors[0]
