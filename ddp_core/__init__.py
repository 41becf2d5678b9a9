"""Data-parallel training whose result does not depend on the layout.

The names in `__all__` are the short list that a user learns. Each is loaded when it is first asked for, so that `import
ddp_core` takes no time and an experiment's file loads no trainer. docs/reference/api.md has these names and the others
that may be used; the rest is private.

Rooms from the ground up: `base`; `reduction`, `checkpoint`, `sampler`, `distributed`, `numerics`, `config`; `sharding`,
`data`, `model`, `adapters`, `observe`; `experiment`; `trainers`; `record`; `run`, `launch`; `live`; `cli`. A room
imports from lower floors only. One way leads through them: words, one request, workers, steps, the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_core.checkpoint import Checkpointer, load
    from ddp_core.cli.training import train
    from ddp_core.config.experiment import Component, Experiment, Optimizer, Schedule
    from ddp_core.data.splits import InMemory, Splits
    from ddp_core.observe.callback import Callback, EarlyStopping, Moment
    from ddp_core.record.reading import Run
    from ddp_core.record.trained import load_model
    from ddp_core.reduction import ExactReduction
    from ddp_core.sampler import ElasticSampler, MicroBatches

    __version__: str

__all__ = [
    "Callback",
    "Checkpointer",
    "Component",
    "EarlyStopping",
    "ElasticSampler",
    "ExactReduction",
    "Experiment",
    "InMemory",
    "MicroBatches",
    "Moment",
    "Optimizer",
    "Run",
    "Schedule",
    "Splits",
    "__version__",
    "load",
    "load_model",
    "train",
]

_PLACES = {
    "Callback": "ddp_core.observe.callback",
    "Checkpointer": "ddp_core.checkpoint",
    "Component": "ddp_core.config.experiment",
    "EarlyStopping": "ddp_core.observe.callback",
    "ElasticSampler": "ddp_core.sampler",
    "ExactReduction": "ddp_core.reduction",
    "Experiment": "ddp_core.config.experiment",
    "InMemory": "ddp_core.data.splits",
    "MicroBatches": "ddp_core.sampler",
    "Moment": "ddp_core.observe.callback",
    "Optimizer": "ddp_core.config.experiment",
    "Run": "ddp_core.record.reading",
    "Schedule": "ddp_core.config.experiment",
    "Splits": "ddp_core.data.splits",
    "load": "ddp_core.checkpoint",
    "load_model": "ddp_core.record.trained",
    "train": "ddp_core.cli.training",
}
"""The module that each name is loaded from. The imports above say the same to type checkers, which do not run this."""


def __getattr__(name: str) -> Any:
    """A name of the list above, loaded now (PEP 562). Raises AttributeError, with the nearest name, for any other."""
    value: Any
    if name == "__version__":
        value = _version()
    elif name in _PLACES:
        from importlib import import_module

        from ddp_core.base.platforms import refused_platform

        try:
            value = getattr(import_module(_PLACES[name]), name)
        except ModuleNotFoundError:
            if (reason := refused_platform()) is None:
                raise
            raise ImportError(reason) from None
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("samebits")
    except metadata.PackageNotFoundError:
        return "unknown"  # the folder was put on Python's path without being installed


def _hint(name: str) -> str:
    if name.startswith("_"):
        return ""  # asked for by a tool that looks what a module has
    from ddp_core.base.errors import nearest_name

    return f"; {nearest_name(name, [known for known in __all__ if not known.startswith('_')])}"
