"""`ddp train X --seeds 0-4`: the same training once for each seed, and its figures over the seeds."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli.seeds_table import table_over_seeds
from ddp_core.cli.trials import Trial, require_one_machine, train_all
from ddp_core.config.options import Asked
from ddp_core.record.over_seeds import over_seeds


def train_seeds(
    asked: Asked, seeds: str, at_once: int | None, is_dry_run: bool, blamed: AbstractContextManager[None]
) -> int:
    """Train what is `asked` for with each of the seeds; returns 0, or the exit code of the first that failed.

    `blamed`: the context in which an error about a setting names the file of --config. Raises UserError.
    """
    numbers = seeds_in(seeds)
    require_one_machine("--seeds", asked)
    if any(setting.partition("=")[0].strip() == "seed" for setting in asked.settings):
        raise UserError("--seeds and --set seed=… both choose the seed: leave one of them out")
    if asked.resume not in ("auto", "never"):
        raise UserError("--seeds continues each seed's own run: leave --resume RUN out")
    if asked.fork is not None:
        raise UserError("--seeds and --fork: a fork goes on with its parent's seed; for its weights: --init-from RUN")
    with blamed:
        trials = [Trial.of(f"seed {seed}", asked, [f"seed={seed}"]) for seed in numbers]
    if is_dry_run:
        for trial in trials:
            done = trial.completed()
            print(f"{trial.name}: {f'completed, {done[0].path}' if done else 'would be trained'}")
        return ExitCode.DONE
    code = train_all(trials, at_once)
    found = [run[1] for trial in trials if (run := trial.completed()) is not None]
    if (table := table_over_seeds(over_seeds(found), trials[0].loaded.experiment.name)) is not None:
        print(table)
    return code


def seeds_in(text: str) -> list[int]:
    """The seeds that `0-4` or `0,3,7-9` names, each once, in this order. Raises UserError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (each.strip() for each in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UserError(f"--seeds {text}: expected numbers and ranges of numbers, such as 0-4 or 0,3,7")
        found += range(int(first), int(last or first) + 1)
        if len(found) > 10_000:
            raise UserError(f"--seeds {text}: more than 10,000 trainings")
    return list(dict.fromkeys(found))
