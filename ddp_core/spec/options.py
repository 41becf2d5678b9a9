"""How a run is carried out: everything beside experiment and layout, with its default; recorded in run.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from ddp_core.errors import UserError
from ddp_core.spec.experiment import Frozen, explain


class Options(Frozen):
    """Settings of a run that change neither what is trained nor where; `reduction` decides the last bits only."""

    reduction: Literal["exact", "plain"] = "exact"
    launcher: Literal["in-process", "torchrun", "spawn", "external"] = "in-process"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    output: str = "outputs"
    data_dir: str = "data"
    workers: int = Field(0, ge=0)
    """Loader processes per rank; 0 loads in line."""
    checkpoint_every: int | None = Field(None, gt=0)
    """Steps between checkpoints; None: at the end of each epoch."""
    keep_last: int = Field(2, ge=1)
    keep_every: int | None = Field(None, gt=0)
    asynchronous_save: bool = True
    log_every: int = Field(10, gt=0)
    digest_every: int | None = Field(None, gt=0)
    """Steps between weight digests in the metrics; None: at the end of each epoch."""
    timeout: float = Field(60.0, gt=0)
    """Seconds after which a silent peer counts as lost."""
    on_nan: Literal["stop", "skip"] = "stop"
    max_seconds: float | None = Field(None, gt=0)
    stop_signal: str | None = None
    max_restarts: int = Field(3, ge=0)
    ledger: bool = False
    tensorboard: bool = False
    profile: str | None = None
    """First and last step of a trace, as '20:25'."""
    faults: tuple[str, ...] = ()
    """Scripted faults, see ddp_core.faults."""

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """Raises UserError naming each option whose value cannot be."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(f"option {explain(error)}") from None
