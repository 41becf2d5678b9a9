"""What leaves no place for a shard mode, in an experiment and in a request."""

from __future__ import annotations

from ddp_core.base.errors import UserError
from ddp_core.config.experiment import DdpOptions, Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked
from ddp_core.experiment.request import promise_broken_by


def shards_refused_by(experiment: Experiment) -> str | None:
    """Why no shard mode can be had for this experiment; None where its settings say nothing against it."""
    usual = DdpOptions()
    for name in ("static_graph", "communication_hook"):
        if getattr(experiment.ddp, name) != getattr(usual, name):
            return f"it does without DistributedDataParallel, so that the setting ddp.{name} would change nothing"
    if experiment.sync_batch_norm:
        return "sync_batch_norm is for the plain sums of DistributedDataParallel, and it does without that"
    return None


def whole_parameters_needed_by(experiment: Experiment) -> str | None:
    """Why the parameters cannot be sharded, where optimizer and gradients can; None where settings say nothing."""
    if experiment.ema_decay is not None:
        return "ema_decay keeps an average of whole weights on every rank, and no rank has whole weights"
    if experiment.memory_format != "contiguous":
        return (
            f"parameters are cut between rows, which do not lie together with memory_format {experiment.memory_format}"
        )
    return None


def check_shards(asked: Asked, experiment: Experiment, layout: Layout) -> None:
    """Raises UserError where a shard mode is asked for that cannot be had."""
    option = f"--shard {layout.shard}"
    if layout.shard == "none":
        return
    if (reason := shards_refused_by(experiment)) is not None:
        raise UserError(f"{option}: {reason}; leave --shard out")
    if layout.shard == "parameters":
        if (reason := whole_parameters_needed_by(experiment)) is not None:
            raise UserError(f"{option}: {reason}; use --shard gradients, or leave it out")
    else:
        _require_exact(option, asked, experiment)
    if asked.cuda_graph:
        raise UserError(
            f"--cuda-graph: {option} sends gradients from within backward, which no graph holds; leave one of them out"
        )


def _require_exact(option: str, asked: Asked, experiment: Experiment) -> None:
    """Torch's own sums are made by DistributedDataParallel, or by fully_shard, which shards the parameters."""
    instead = "--shard parameters, or leave --shard out"
    if (reason := promise_broken_by(experiment)) is not None:
        raise UserError(f"{option} needs the exact reduction, which cannot be had here: {reason}; use {instead}")
    if (asked.reduction or experiment.reduction) == "plain":
        raise UserError(
            f"{option} needs the exact reduction: plain sums are those of DistributedDataParallel, which gives all "
            f"gradients to every rank; use --reduction exact, or {instead}"
        )
