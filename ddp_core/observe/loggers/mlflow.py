"""MLflow: a run in the tracking server that MLFLOW_TRACKING_URI names, else in mlflow.db in the folder of all runs.

The MLflow run carries the run directory's name as a tag, by which a later attempt finds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from ddp_core.observe.loggers.logged import Ending, LoggedRun

_TAG = "ddp.run"
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_PARAMETERS_AT_ONCE = 100
_CHANGING = ("layout", "reduction")
"""Settings in which attempts of one run may differ: tags, because MLflow's parameters cannot be changed."""


class RunLogger:
    """Parameters and metrics of one MLflow run."""

    def __init__(self, run: LoggedRun) -> None:
        local = f"sqlite:///{run.directory.parent.parent.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        self._id = self._find(run) or self._create(run)
        self._client.update_run(self._id, status="RUNNING")
        for name in _CHANGING:
            if name in run.settings:
                self._client.set_tag(self._id, name, run.settings[name])

    def _experiment(self, run: LoggedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.experiment
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))

    def _find(self, run: LoggedRun) -> str | None:
        found = self._client.search_runs([self._experiment(run)], f"tags.`{_TAG}` = '{run.name}'")
        return found[0].info.run_id if found else None

    def _create(self, run: LoggedRun) -> str:
        created = self._client.create_run(self._experiment(run), run_name=run.name, tags={_TAG: run.name})
        parameters = [Param(name, str(value)) for name, value in run.settings.items() if name not in _CHANGING]
        for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(created.info.run_id, params=parameters[first : first + _PARAMETERS_AT_ONCE])
        return str(created.info.run_id)

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if values:
            moment = int(1000 * time.time())
            metrics = [Metric(name, value, moment, step) for name, value in values.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        self.record("result", 0, {f"result/{name}": value for name, value in figures.items()})
        self._client.set_tag(self._id, "weights_sha256", weights_sha256)

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self._id, _STATUS[ending])
