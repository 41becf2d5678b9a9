"""Weights & Biases: a run whose id is the run directory's name, so that a later attempt continues it.

WANDB_MODE=offline writes it to `wandb/` in the run directory alone; `wandb sync` sends it later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.observe.loggers.logged import Ending, LoggedRun

_EXIT_CODE = {"completed": ExitCode.DONE, "stopped": ExitCode.STOPPED, "failed": 1}


def require_login() -> None:
    """Raises UserError where nobody is logged in, unless W&B is set to work offline."""
    ready = wandb.setup().settings.mode in ("offline", "disabled", "dryrun") or wandb.login(prompt=False, verify=False)
    wandb.teardown()
    if not ready:
        raise UserError("--log-to wandb needs a login: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline")


class RunLogger:
    """Configuration, history and summary of one W&B run."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.experiment,
            id=run.name,
            name=run.name,
            dir=run.directory,
            config=dict(run.settings),
            allow_val_change=True,  # an attempt may have another layout than the one before
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        # W&B's own step only ever grows, but a resumed run trains steps again.
        self._run.define_metric("*", step_metric="step")

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if values:
            self._run.log({"step": step, **values})

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        self._run.summary.update({f"result/{name}": value for name, value in figures.items()})
        self._run.summary["weights_sha256"] = weights_sha256

    def close(self, ending: Ending) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(_EXIT_CODE[ending]))
        wandb.teardown()
