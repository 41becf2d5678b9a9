"""The experiment's own figures of an evaluation: named sums and counts, exact on every layout.

Whole numbers are added as int64, which is exact in any sequence. Floating-point numbers go into a table of zeros with a
row for each batch, as the losses do (ddp_core/trainers/evaluation.py), so that the sum over ranks is exact and
`math.fsum` rounds once. Figures on a GPU are read when all batches are done, so that the host does not wait for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.distributed.process_group import Collectives

NamedMetrics = Callable[..., Any]
"""`metrics(outputs, targets)` of an experiment file: a dict of name -> (sum, count), or of name -> total."""

_TAKEN = ("loss", "accuracy")  # names of figures that every evaluation has
_Kinds = dict[str, tuple[tuple[bool, tuple[int, ...]], ...]]
"""For each name, of its total or of its sum and count: whether it is a floating-point number, and its shape."""


class NamedSums:
    """Adds up the figures of the evaluation batches that this rank computes."""

    def __init__(self, metrics: NamedMetrics, batches: int) -> None:
        self._metrics, self._batches = metrics, batches
        self._kinds: _Kinds | None = None
        self._whole: dict[tuple[str, int], Tensor] = {}
        self._rows: dict[int, list[Tensor]] = {}

    def add(self, batch: int, outputs: Any, targets: Any) -> None:
        """Add the figures of one batch. Raises UserError where the function returns something else than it should."""
        with user_code("your metrics"):
            values = self._metrics(outputs, targets)
        found = {name: _parts(name, value) for name, value in _checked(values).items()}
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

    def totals(self, collectives: Collectives) -> dict[str, Any]:
        """`test_<name>` of every figure, the same on every rank: numbers and nested lists, null where not finite."""
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
        values: dict[str, list[Any]] = {}
        for name, number, is_floating, shape in sizes:
            if is_floating:
                flat = [next(sums) for _ in range(math.prod(shape))]
            else:
                zeros = torch.zeros(shape, dtype=torch.int64)
                flat = collectives.sum_(self._whole.get((name, number), zeros).cpu()).flatten().tolist()
            values.setdefault(name, []).append(np.array(flat, dtype=object).reshape(shape))
        quotients = np.vectorize(_quotient, otypes=[object])
        return {f"test_{name}": quotients(*parts).tolist() for name, parts in values.items()}


def _checked(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise UserError(
            f"metrics returned a {type(found).__name__}; it returns a dict of name -> (sum, count) or name -> tensor"
        )
    for name in found:
        if not isinstance(name, str) or not name:
            raise UserError(f"metrics returned a figure named {name!r}; a name is a str")
        if name in _TAKEN:
            raise UserError(f"metrics returned `{name}`, which every evaluation reports as test_{name}; rename it")
    return found


def _parts(name: str, value: Any) -> tuple[Tensor, ...]:
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


def _number(name: str, part: Any) -> Tensor:
    if isinstance(part, int | float):
        return torch.tensor(part, dtype=torch.float64 if isinstance(part, float) else torch.int64)
    if not isinstance(part, Tensor) or part.is_complex():
        kind = str(part.dtype) if isinstance(part, Tensor) else type(part).__name__
        raise UserError(f"metrics: {name} is a {kind}; it is a tensor, a number, or a pair of them (sum, count)")
    return part.detach().to(torch.float64 if part.is_floating_point() else torch.int64)


def _require_same(ours: _Kinds, theirs: _Kinds) -> None:
    if ours.keys() != theirs.keys():
        raise UserError(
            f"metrics returned {', '.join(sorted(ours))} for one batch and {', '.join(sorted(theirs))} for another; "
            "return the same names for every batch"
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
    """The total, or sum / count; None where that is not a finite number."""
    if count == 0:
        return None
    value = total if count is None else total / count
    return value if math.isfinite(value) else None
