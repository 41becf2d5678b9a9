"""`ddp sweep FILE`: train each combination of a grid, or what Optuna asks for, and name the best."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError, nearest_name
from ddp_core.cli.trials import Trial, require_one_machine, train_all
from ddp_lab.options import Parser
from ddp_lab.sweep.plan import Plan, read_plan
from ddp_lab.sweep.study import Study


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command; returns 0, or the exit code of the first training that failed."""
    options = _parser().parse_args(arguments)
    if options.at_once is not None and options.at_once < 1:
        raise UserError(f"--at-once {options.at_once}: expected a number from 1")
    plan = read_plan(options.file, options.output)
    if options.words:
        return _print_words(plan)
    if not options.look:
        require_one_machine("ddp sweep", plan.asked)
    code = 0
    if plan.grid:
        trials = [_trial(plan, settings) for settings in plan.combinations()]
        if not options.look:
            code = train_all(trials, options.at_once)
    else:
        study = Study(plan)
        if not options.look:
            code = _search(plan, study)
        trials = [_trial(plan, settings) for settings in study.finished]
    _show(plan, trials, options.as_json)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ddp sweep", description="Train with many settings, each in a run of its own, and name the best."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="The sweep: a TOML, YAML or JSON file.")
    parser.add_argument("--output", metavar="DIR", help="The folder of the runs. [default: the file's, or outputs]")
    parser.add_argument(
        "--at-once",
        type=int,
        metavar="N",
        help="So many trainings of a grid at a time. [default: as many as there are GPUs for; on the CPU 1]",
    )
    parser.add_argument("--words", action="store_true", help="Only print the words after `ddp train` of each trial.")
    parser.add_argument("--look", action="store_true", help="Train nothing: show what is completed, and the best.")
    parser.add_argument("--json", action="store_true", dest="as_json", help="Print the result as one JSON document.")
    return parser


def _trial(plan: Plan, settings: tuple[str, ...]) -> Trial:
    return Trial.of(" ".join(settings), plan.asked, settings)


def _print_words(plan: Plan) -> int:
    """The words after `ddp train EXPERIMENT` of each trial of a grid, a line each: for an array of jobs."""
    if not plan.grid:
        raise UserError(f"{plan.path}: only the trials of a [grid] are known beforehand; Optuna asks one after another")
    words = plan.asked.to_words()[1:]
    for settings in plan.combinations():
        print(shlex.join([*words, *(word for setting in settings for word in ("--set", setting))]))
    return ExitCode.DONE


def _search(plan: Plan, study: Study) -> int:
    """Train what Optuna asks for; a trial that fails has no figure, and the search goes on."""
    for number, settings in study.asks():
        print(f"trial {number + 1} of {plan.trials}", flush=True)
        trial = _trial(plan, settings)
        code = train_all([trial])
        # A mistake in the first is most likely one in all of them.
        if code == ExitCode.STOPPED or (code == ExitCode.BAD_INPUT and not study.finished):
            return code
        study.tell(number, _value(plan, trial))
    return ExitCode.DONE


def _value(plan: Plan, trial: Trial) -> float | None:
    """The figure of the trial's completed run; None without one. Raises UserError where it has no such figure."""
    if (found := trial.completed()) is None:
        return None
    result = found[1]["result"]
    if plan.metric not in result:
        numbers = [name for name, value in result.items() if isinstance(value, int | float)]
        raise UserError(f"{plan.path}: metric: a run has no {plan.metric}; {nearest_name(plan.metric, numbers)}")
    value = result[plan.metric]
    return float(value) if isinstance(value, int | float) else None


def _show(plan: Plan, trials: Iterable[Trial], as_json: bool) -> None:
    """The completed trials, the best first, and its run."""
    rows: list[tuple[float, str, str]] = []
    unfinished = 0
    for trial in trials:
        value, run = _value(plan, trial), trial.completed()
        if value is None or run is None:
            unfinished += 1
        else:
            rows.append((value, trial.name, str(run[0].path)))
    rows.sort(key=lambda row: row[0], reverse=plan.mode == "max")
    if as_json:
        told: list[dict[str, Any]] = [{"settings": name, "value": value, "run": path} for value, name, path in rows]
        print(json.dumps({"metric": plan.metric, "mode": plan.mode, "trials": told, "unfinished": unfinished}))
        return
    metric = plan.metric.replace("_", " ")
    for value, name, path in rows:
        print(f"{metric} {value:<10.6g}  {name}  {Path(path).name}")
    if unfinished:
        print(f"without a result: {unfinished}")
    if rows:
        value, name, path = rows[0]
        print(f"best: {name}, {metric} {value:.6g}: {path}")
