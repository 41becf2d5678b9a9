"""The result of a run: whether all ranks ended with the same weights, and the figures for its record."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddp_core.base.digests import first_difference, optimizer_digest, weights_digest
from ddp_core.base.files import NewFile, sync
from ddp_core.base.refusals import refused
from ddp_core.checkpoint import Fence
from ddp_core.observe.heartbeat import slowest
from ddp_core.observe.metrics import each_record, readable
from ddp_core.observe.usage import RankTotals, Totals, of_all
from ddp_core.trainers import Trainer
from ddp_core.trainers.checks import other_state, replicated

_FEW_PARAMETERS = 16


@dataclass(frozen=True)
class Ends:
    """What is gathered from all ranks at the end of training."""

    weights: str
    """The digest of the weights, the same on every rank."""
    average: str | None
    """The digest of the averaged weights, where there are any, the same on every rank."""
    state: dict[str, Any]
    """The model's state dict, as one process has it; where parameters are sharded, empty on all ranks but 0."""
    optimizer: str | None
    """The digest of the optimizer's state (rank 0)."""
    usage: Totals
    slowest: str | None
    """A line about the slowest rank, where it stands out."""


def gather_ends(trainer: Trainer, speed: dict[str, float], usage: RankTotals) -> Ends:
    """Gather from all ranks what they ended with. Raises UserError where weights differ, unless the guard goes on."""
    collectives, state = trainer.job.collectives, trainer.state
    world = collectives.world
    average = None if state.average is None else weights_digest(state.average.module.state_dict())
    weights, whole = state.ownership.whole_weights(), state.ownership.whole_state()
    # Where parameters are sharded, rank 0 has put the whole together, and the other ranks have nothing to compare.
    digests = (None if weights is None else weights_digest(weights), average)
    parts = collectives.gather((digests, (world.rank, world.node_rank, speed), usage))
    ends = [part[0] for part in parts]
    if any(end not in (ends[0], (None, ends[0][1])) for end in ends) and not trainer.guard.is_broken:
        found = first_difference(collectives.gather, replicated(state))
        with trainer.guard.check("same state", state.step):
            what = found or "the state_dict is not the same on all ranks"
            raise other_state(what, state.step, "the run has no result")
    optimizer = optimizer_digest(whole) if world.is_first and whole is not None else None
    totals, slow = of_all([part[2] for part in parts]), slowest([part[1] for part in parts])
    return Ends(ends[0][0], average, weights or {}, optimizer, totals, slow)


def result_of(trainer: Trainer, weights: Mapping[str, Any], metrics: Path, seconds: float) -> dict[str, Any]:
    """The figures for the run's record, with the parameters' values where there are at most 16."""
    state, parameters = trainer.state, dict(trainer.state.model.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    told = (record.get("data_wait") for record in each_record(metrics, "step"))
    waits = array("d", (wait for wait in told if wait is not None))
    result = {
        "train_loss": state.position.last_epoch_loss,
        **state.position.evaluation,
        "samples_per_second": state.position.trained_samples / state.position.trained_seconds
        if state.position.trained_seconds
        else None,
        "seconds": round(seconds, 3),
        "steps": state.step,
        "time_split": trainer.clock.per_step(),
        "data_wait": sum(waits) / len(waits) if waits else None,
        "parameters": count,
    }
    if count <= _FEW_PARAMETERS:
        result["values"] = {name: _numbers(weights[name]) for name in parameters}
    return result


def early_end(trainer: Trainer) -> dict[str, Any] | None:
    """Where a callback has ended the run, and why, for its record; None where all steps were trained."""
    reason = trainer.state.position.ended_early
    return None if reason is None else {"step": trainer.state.step, "of": trainer.steps.total, "reason": reason}


def _numbers(tensor: Tensor) -> list[float]:
    """A tensor's elements, as JSON can hold them: of a complex one both parts."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.flatten().tolist()


def summary(result: dict[str, Any]) -> str:
    """The figures that a person looks for, in one line."""
    named = ("train_loss", "test_", "ema_test_")
    figures = readable({name: value for name, value in result.items() if name.startswith(named)})
    figures += [f"{name} {values[0]:.4f}" for name, values in result.get("values", {}).items() if len(values) == 1]
    if result["samples_per_second"]:
        figures.append(f"{result['samples_per_second']:.0f} samples/s")
    return ", ".join(figures)


def save_weights(state: Mapping[str, Any], path: Path, fence: Fence) -> None:
    """Write a model's state dict as safetensors; a tensor with several names is written once.

    The file is on the disk when this returns. Raises UserError (4) where it cannot be written, and Superseded, with the
    file that is there left as it was, where another process has taken the run over.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    try:
        with NewFile(path) as new:
            mode = new.temporary.stat().st_mode & 0o777
            # save_model asks nothing of a model but its state dict.
            model = SimpleNamespace(state_dict=lambda: _apart(state))
            save_model(model, str(new.temporary))  # type: ignore[arg-type]
            new.temporary.chmod(mode)  # safetensors has put another file under this name, for the owner alone
            sync(new.temporary)
            with fence.holding():
                new.rename()
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise refused(error, path) from None


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with copies of tensors that share a part of their memory with others: of a row, say."""
    # safetensors would leave them out, or refuse all of them, and the file could not be compared with the digest.
    views: dict[int, set[tuple[Any, ...]]] = {}
    for tensor in state.values():
        views.setdefault(tensor.untyped_storage().data_ptr(), set()).add(_view(tensor))
    copies = {
        _view(tensor): tensor.clone()
        for tensor in state.values()
        if len(views[tensor.untyped_storage().data_ptr()]) > 1
    }
    return {name: copies.get(_view(tensor), tensor) for name, tensor in state.items()}


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
