"""The experiment's own figures of an evaluation: named sums and counts, exact on every layout.

Whole numbers are added as int64, which is exact in any sequence. Floating-point numbers go into a table of zeros with a
row for each batch, as the losses do (ddp_core/trainers/evaluation.py), so that the sum over ranks is exact and
`math.fsum` rounds once. Figures on a GPU are read when all batches are done, so that the host does not wait for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.distributed.process_group import Collectives

NamedMetric = Callable[..., Any]
"""`metric(outputs, targets)` returns what is added up over the batches: (sum, count), a total, or a dict of these."""


class _Name(NamedTuple):
    """The name of a metric, empty for the function `metrics`, and the key of a figure in the dict that it returns."""

    metric: str
    key: str

    def __str__(self) -> str:
        return "_".join(filter(None, self))


_Kinds = dict[_Name, tuple[tuple[bool, tuple[int, ...]], ...]]
"""For each name, of its total or of its sum and count: whether it is a floating-point number, and its shape."""


class NamedSums:
    """Adds up the figures of the evaluation batches that this rank computes."""

    def __init__(self, metrics: Mapping[str, NamedMetric], batches: int) -> None:
        self._metrics, self._batches = metrics, batches
        self._kinds: _Kinds | None = None
        self._whole: dict[tuple[_Name, int], Tensor] = {}
        self._rows: dict[int, list[Tensor]] = {}

    def add(self, batch: int, outputs: Any, targets: Any) -> None:
        """Add the figures of one batch. Raises UserError where a function returns something else than it should."""
        found: dict[_Name, tuple[Tensor, ...]] = {}
        for metric, function in self._metrics.items():
            with user_code("your metrics"):
                values = function(outputs, targets)
            found |= {name: _parts(name, value) for name, value in _named(metric, values)}
        kinds: _Kinds = {
            name: tuple((part.is_floating_point(), tuple(part.shape)) for part in parts)
            for name, parts in found.items()
        }
        if self._kinds is not None:
            _require_same(self._kinds, kinds)
        self._kinds = kinds
        rows = []
        for name, parts in sorted(found.items()):
            for number, part in enumerate(parts):
                if part.is_floating_point():
                    rows.append(part.flatten().clone())  # the function may go on to change its tensor
                else:
                    before = self._whole.get((name, number))
                    self._whole[name, number] = part if before is None else before + part
        self._rows[batch] = rows

    def figures(self, collectives: Collectives) -> Callable[[], dict[str, Any]]:
        """Add up over the ranks, and return what makes the figures of the sums.

        A mean, a total, or what the metric's own `finish` returns.
        """
        sums = self._everyones(collectives)
        return lambda: {metric: self._finished(metric, function, sums) for metric, function in self._metrics.items()}

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

    def _everyones(self, collectives: Collectives) -> dict[_Name, list[Any]]:
        """The total of each figure, or its sum and its count, over all ranks: arrays of Python's numbers."""
        every = [kinds for kinds in collectives.gather(self._kinds) if kinds is not None]
        for kinds in every[1:]:
            _require_same(every[0], kinds)
        sizes = [
            (name, number, *part)
            for name, parts in sorted((every[0] if every else {}).items())
            for number, part in enumerate(parts)
        ]
        columns = sum(math.prod(shape) for *_, is_floating, shape in sizes if is_floating)
        table = torch.zeros(self._batches, columns, dtype=torch.float64)
        for batch, rows in self._rows.items():
            if rows:
                table[batch] = torch.cat([part.cpu() for part in rows])
        sums = iter([math.fsum(column) for column in collectives.sum_(table).T.tolist()] if columns else [])
        values: dict[_Name, list[Any]] = {}
        for name, number, is_floating, shape in sizes:
            if is_floating:
                flat = [next(sums) for _ in range(math.prod(shape))]
            else:
                zeros = torch.zeros(shape, dtype=torch.int64)
                flat = collectives.sum_(self._whole.get((name, number), zeros).cpu()).flatten().tolist()
            values.setdefault(name, []).append(np.array(flat, dtype=object).reshape(shape))
        return values


def _named(metric: str, found: Any) -> Iterator[tuple[_Name, Any]]:
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


def _require_same(ours: _Kinds, theirs: _Kinds) -> None:
    if ours.keys() != theirs.keys():
        names, others = (", ".join(sorted(map(str, kinds))) for kinds in (ours, theirs))
        raise UserError(
            f"metrics returned {names} for one batch and {others} for another; return the same names for every batch"
        )
    for name, kinds in ours.items():
        if kinds != theirs[name]:
            raise UserError(
                f"metrics: {name} is {_in_words(kinds)} for one batch and {_in_words(theirs[name])} for another; sum "
                "over the samples, so that the shape does not depend on their number"
            )


def _in_words(kinds: tuple[tuple[bool, tuple[int, ...]], ...]) -> str:
    return " and ".join(f"{'float' if is_floating else 'int'} {list(shape)}" for is_floating, shape in kinds)


def _quotient(total: float, count: float | None = None) -> float | None:
    """The total, or sum / count; None where nothing was counted."""
    return None if count == 0 else total if count is None else total / count


def _as_tensors(parts: list[Any]) -> Tensor | tuple[Tensor, ...]:
    """A total, or a sum and its count, as float64 on the CPU, in which a division by zero is no error."""
    tensors = tuple(torch.tensor(part.tolist(), dtype=torch.float64) for part in parts)
    return tensors if len(tensors) > 1 else tensors[0]
