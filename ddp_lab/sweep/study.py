"""A search by Optuna that goes on after a kill: what it has asked for is kept in a journal beside the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.extras import require
from ddp_lab.sweep.plan import Plan


class Study:
    """Asks Optuna for settings, and tells it how good they were.

    The settings of trial n follow from the seed, n, and the results before: a search that was killed and continued asks
    for the same as one that was not. Raises UserError where Optuna is missing, and where the journal is that of another
    search.
    """

    def __init__(self, plan: Plan) -> None:
        require(f"{plan.path}: [search], unlike a [grid],", "sweeps")
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self._optuna, self._plan = optuna, plan
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder = Path(plan.asked.output) / "sweeps"
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / f"{plan.path.stem}.journal"
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(journal))),
            study_name=plan.path.stem,
            direction="minimize" if plan.mode == "min" else "maximize",
            load_if_exists=True,
        )
        known = self._study.user_attrs.get("plan")
        if known is None:
            self._study.set_user_attr("plan", plan.digest)
        elif known != plan.digest:
            raise UserError(
                f"{journal} is the journal of another search: {plan.path} has been changed since; give the file "
                "another name, or remove the journal"
            )

    def asks(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Number and settings of each trial without a result, until there are as many as the plan wants."""
        for trial in self._study.trials:
            if not trial.state.is_finished():
                yield trial.number, self._settings(trial.params)
        while (number := len(self._study.trials)) < self._plan.trials:
            self._study.sampler = self._optuna.samplers.TPESampler(seed=self._plan.seed + number)
            asked = self._study.ask(self._distributions())
            yield asked.number, self._settings(asked.params)

    def tell(self, number: int, value: float | None) -> None:
        """The figure of a trial; None, or a number that is not finite, where it has none."""
        if value is None or not math.isfinite(value):
            self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(number, value)

    @property
    def finished(self) -> list[tuple[str, ...]]:
        """The settings of all trials with a result, or with a failure, each once."""
        found = [self._settings(trial.params) for trial in self._study.trials if trial.state.is_finished()]
        return list(dict.fromkeys(found))

    def _settings(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        return self._plan.settings({name: values[name] for name in self._plan.search})

    def _distributions(self) -> dict[str, Any]:
        return {name: self._distribution(values) for name, values in self._plan.search.items()}

    def _distribution(self, values: Any) -> Any:
        kinds = self._optuna.distributions
        if isinstance(values, list):
            return kinds.CategoricalDistribution(values)
        is_whole = all(isinstance(values.get(key, 0), int) for key in ("low", "high", "step"))
        make = kinds.IntDistribution if is_whole else kinds.FloatDistribution
        step = {"step": values["step"]} if "step" in values else {}
        return make(values["low"], values["high"], log=bool(values.get("log", False)), **step)
