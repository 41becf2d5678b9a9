"""The loggers that `--log-to` can name: whether what they need is there, and how they are started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from ddp_core.base.errors import UserError
from ddp_core.observe.loggers.background import BackgroundLogger
from ddp_core.observe.loggers.logger import LoggedRun, Logger

# The modules that each logger imports, with the packages that bring them.
_NEEDS = {
    "tensorboard": {"tensorboard": "tensorboard"},
    "mlflow": {"mlflow": "mlflow-skinny", "sqlalchemy": "sqlalchemy", "alembic": "alembic"},
    "wandb": {"wandb": "wandb"},
}


def check_loggers(names: Iterable[str]) -> None:
    """Raises UserError where a package is missing, with the command that installs it, or where a login is missing."""
    for name in dict.fromkeys(names):
        missing = [package for module, package in _NEEDS[name].items() if find_spec(module) is None]
        if missing:
            packages = " ".join(missing)
            raise UserError(f"--log-to {name} needs packages that are not installed: pip install {packages}")
        if name == "wandb":
            from ddp_core.observe.loggers.wandb import require_login

            require_login()


def start_loggers(names: Iterable[str], run: LoggedRun, warn: Callable[[str], None]) -> list[BackgroundLogger]:
    """A logger for each name, already at work; `warn` is told of one that fails."""
    return [BackgroundLogger(name, partial(_make, name, run), warn) for name in dict.fromkeys(names)]


def _make(name: str, run: LoggedRun) -> Logger:
    """Each module's own `Run`; importing what that module needs takes a second or two."""
    logger: Logger = import_module(f"ddp_core.observe.loggers.{name}").Run(run)
    return logger
