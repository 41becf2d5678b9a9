"""The result of a run: whether all ranks ended with the same weights, and the figures for its record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ddp_core.determinism.digests import optimizer_digest, weights_digest
from ddp_core.errors import ExitCode, UserError
from ddp_core.observe.heartbeat import slowest
from ddp_core.observe.metrics import read_metrics
from ddp_core.observe.usage import RankTotals, Totals, of_all
from ddp_core.trainers import Trainer
from ddp_core.trainers.watch import in_words

_FEW_PARAMETERS = 16


@dataclass(frozen=True)
class Ends:
    """What all ranks report at the end of training."""

    weights: str
    """The digest of the weights, the same on every rank."""
    average: str | None
    """The digest of the averaged weights, where there are any, the same on every rank."""
    optimizer: str | None
    """The digest of the optimizer's state (rank 0)."""
    usage: Totals
    slowest: str | None
    """A line about the slowest rank, where it stands out."""


def gather_ends(trainer: Trainer, speed: dict[str, float], usage: RankTotals) -> Ends:
    """Gather what all ranks report, with the optimizer's state where each rank has a part of it.

    Raises RuntimeError where the weights differ.
    """
    collectives, state = trainer.job.collectives, trainer.state
    world = collectives.world
    average = None if state.average is None else weights_digest(state.average.module.state_dict())
    digests = (weights_digest(state.model.state_dict()), average)
    whole = state.optimizer_state()
    parts = collectives.gather((digests, (world.rank, world.node_rank, speed), usage))
    other = [rank for rank, part in enumerate(parts) if part[0] != digests]
    if other:
        raise RuntimeError(f"{world.place}: ranks {other} ended with other weights: this is a bug or broken memory")
    optimizer = optimizer_digest(whole) if world.is_first and whole is not None else None
    return Ends(*digests, optimizer, of_all([part[2] for part in parts]), slowest([part[1] for part in parts]))


def result_of(trainer: Trainer, metrics: Path, seconds: float) -> dict[str, Any]:
    """The figures for the run's record, with the parameters' values where there are at most 16.

    `seconds` is how long the run took.
    """
    state, parameters = trainer.state, dict(trainer.model.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    waits = [record["data_wait"] for record in read_metrics(metrics, "step")]
    result = {
        "train_loss": state.last_epoch_loss,
        **state.evaluation,
        "samples_per_second": state.trained_samples / state.trained_seconds if state.trained_seconds else None,
        "seconds": round(seconds, 3),
        "steps": state.step,
        "time_split": trainer.clock.per_step(),
        "data_wait": sum(waits) / len(waits) if waits else None,
        "parameters": count,
    }
    if count <= _FEW_PARAMETERS:
        result["values"] = {name: parameter.detach().flatten().tolist() for name, parameter in parameters.items()}
    return result


def summary(result: dict[str, Any]) -> str:
    """The figures that a person looks for, in one line."""
    named = ("train_loss", "test_", "ema_test_")
    figures = in_words({name: value for name, value in result.items() if name.startswith(named)})
    figures += [f"{name} {values[0]:.4f}" for name, values in result.get("values", {}).items() if len(values) == 1]
    if result["samples_per_second"]:
        figures.append(f"{result['samples_per_second']:.0f} samples/s")
    return ", ".join(figures)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the final weights as safetensors. Raises UserError (4) where the file cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    try:
        save_model(model, str(path))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}", ExitCode.RESOURCES) from None
