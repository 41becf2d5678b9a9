"""The file of a sweep: which experiment, which settings, and which figure says how good a trial is."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.cli.config import parse_file
from ddp_core.cli.training import asked_for
from ddp_core.config.options import Asked
from ddp_core.config.records import setting_text

_KEYS = ("experiment", "metric", "mode", "set", "train", "grid", "search", "trials", "seed")
_RANGE = {"low", "high", "step", "log"}
Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Plan:
    """A sweep, as its file says."""

    path: Path
    asked: Asked
    """What all trials have alike."""
    metric: str
    mode: Mode
    grid: Mapping[str, Sequence[Any]]
    """The values of each setting; every combination is a trial. Empty where Optuna searches."""
    search: Mapping[str, Any]
    """A list of values, or the range of a number, of each setting."""
    trials: int
    """How many Optuna trains."""
    seed: int
    """Of Optuna's sampler."""

    @property
    def digest(self) -> str:
        """Changes with what is searched, and not with how many trials."""
        asked = self.asked.model_dump(mode="json", include={"experiment", "settings"})
        text = json.dumps([asked, self.metric, self.mode, dict(self.search), self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def combinations(self) -> list[tuple[str, ...]]:
        """The settings of each trial of the grid, the last name changing fastest."""
        points = itertools.product(*self.grid.values())
        return [self.settings(dict(zip(self.grid, values, strict=True))) for values in points]

    def settings(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Values by name as `--set` takes them. Raises UserError for one that it cannot take."""
        try:
            return tuple(f"{name}={setting_text(value)}" for name, value in values.items())
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.path}: {error}; a setting is a number, a text, true or false, or a list") from None


def read_plan(path: Path, output: str | None) -> Plan:
    """Read the file, TOML, YAML or JSON. `output`: the folder of the runs, if not the file's. Raises UserError."""
    content = parse_file(path, "ddp sweep")
    for key in content:
        if key not in _KEYS:
            raise UserError(f"{path}: a sweep has no {key}; {nearest_name(key, _KEYS)}")
    experiment, metric = content.get("experiment"), content.get("metric", "test_loss")
    if not isinstance(experiment, str) or not isinstance(metric, str):
        raise UserError(f'{path}: say what is trained and compared: experiment = "digits", metric = "test_loss"')
    grid, search = _table(path, content, "grid"), _table(path, content, "search")
    if bool(grid) == bool(search):
        raise UserError(f"{path}: a sweep has either a table [grid], with a list for each setting, or a table [search]")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: [grid] {name} = {values}: expected a list of values")
    for name, values in search.items():
        _check_range(path, name, values)
    options = {key.replace("-", "_"): value for key, value in _table(path, content, "train").items()}
    if output is not None:
        options["output"] = output
    layout = options.pop("layout", None)
    return Plan(
        path,
        asked_for(experiment, layout, _table(path, content, "set"), options),
        metric,
        _mode(path, metric, content.get("mode")),
        grid,
        search,
        _count(path, content, "trials", 20),
        _count(path, content, "seed", 0),
    )


def _table(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table with flat names: `[grid.optimizer]` with `lr` and `[grid]` with `"optimizer.lr"` are the same."""
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: {name} is a table, for example [{name}], and below it optimizer.lr = …")
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not value.keys() & _RANGE:
            flat |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            flat[key] = value
    return flat


def _check_range(path: Path, name: str, values: Any) -> None:
    """Raises UserError unless it is a list of values, or the range of a number."""
    if isinstance(values, list) and values:
        return
    said = f"{path}: [search] {name} = {values}"
    if not isinstance(values, dict) or not {"low", "high"} <= values.keys() <= _RANGE:
        raise UserError(f"{said}: expected a list of values, or a range: {{ low = 0.001, high = 1.0, log = true }}")
    numbers = [values[key] for key in ("low", "high", "step") if key in values]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise UserError(f"{said}: low, high and step are numbers")
    if values["low"] >= values["high"] or (values.get("log") and (values["low"] <= 0 or "step" in values)):
        raise UserError(f"{said}: low is less than high, and with log above 0 and without step")


def _mode(path: Path, metric: str, mode: Any) -> Mode:
    """Whether less or more of the metric is better; its name may say so itself. Raises UserError."""
    if mode is None:
        mode = "min" if "loss" in metric else "max" if "accuracy" in metric else None
    if mode not in ("min", "max"):
        raise UserError(f'{path}: say whether less or more of {metric} is better: mode = "min" or mode = "max"')
    return "min" if mode == "min" else "max"


def _count(path: Path, content: Mapping[str, Any], name: str, default: int) -> int:
    value = content.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < (name == "trials"):
        raise UserError(f"{path}: {name} = {value}: expected a whole number")
    return value
