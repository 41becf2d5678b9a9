"""The experiment's own metrics: functions whose sums count, perhaps with a `finish`, and metrics of torchmetrics."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.distributed.process_group import Collectives
from ddp_core.trainers.metric_states import MetricStates
from ddp_core.trainers.named_sums import NamedMetric, NamedSums

if TYPE_CHECKING:
    from torchmetrics import Metric

_TAKEN = ("loss", "accuracy")  # names of figures that every evaluation has


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


class OwnFigures:
    """The own metrics of one evaluation; `add` is called for the batches that this rank computes."""

    def __init__(self, metrics: OwnMetrics, batches: int, device: torch.device) -> None:
        self._names = metrics.names
        self._sums = NamedSums(metrics.functions, batches)
        self._states = MetricStates(metrics.of_torchmetrics, device, metrics.are_tried)

    def add(self, batch: int, outputs: Any, targets: Any) -> None:
        """Count one batch. Raises UserError for a metric that cannot be counted batch by batch."""
        self._sums.add(batch, outputs, targets)
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
