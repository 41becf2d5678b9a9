"""Passes made before the first step to find a mistake in the experiment's loss or metrics; they leave no trace."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import generators_kept
from ddp_core.base.trees import Collate, Tree
from ddp_core.config.experiment import Evaluation, called
from ddp_core.data.splits import Dataset, first_items
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.model.forward_state import ForwardState
from ddp_core.reduction.watching import DependsOnLayout
from ddp_core.trainers.assemble import Trainer
from ddp_core.trainers.evaluation import evaluate
from ddp_core.trainers.own_metrics import OwnMetrics

_SAMPLES = 2  # many models cannot take a single one
_SAME = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}
"""How far the ratio of a mean may be from 1, by precision: the rounding of a sum depends on how many are added."""
_DOUBLED = 0.05
"""How far the ratio of a sum may be from 2."""


def check_loss(trainer: Trainer) -> None:
    """Warn of a loss that is no sum over samples. Raises UserError, on every rank, for one that averages.

    The trainer adds up the losses of the micro-batches and divides by the samples of the global batch, so with a loss
    that averages all gradients are too small, and nothing later shows that. The loss of two samples is compared with
    that of the same two samples twice in one batch: a sum doubles, a mean does not.

    A loss that is no single number is refused, too. There is no verdict where the loss raises, or is 0 or not finite,
    and none is needed for micro-batches of one sample, whose sum and mean are the same.
    """
    job, experiment, strategy = trainer.job, trainer.job.experiment, trainer.strategy
    batches = strategy.batches
    if batches.cut.micro_batch == 1:
        return
    ids = batches.order.ids(0, 0, min(_SAMPLES, batches.samples))
    job.collectives.barrier()  # so that no rank ends while others still connect to it
    with unchanged(strategy.model, job.device), torch.no_grad():
        try:
            with trainer.state.ownership.forward_alone():
                once, twice = (
                    float(strategy.passes.loss(strategy.model, *batches.loader.fetch(0, numbers)))
                    for numbers in (ids, np.concatenate((ids, ids)))
                )
        except UserError:
            raise
        except DependsOnLayout as error:
            raise UserError(f"{strategy.where}: {error}") from None
        except Exception:  # training meets it, too, and says on which rank
            return
    ratio = twice / once if once else math.nan
    if not math.isfinite(ratio):
        return
    name = called("loss", experiment.loss)
    found = f"{name} gives {once:.6g} for {_SAMPLES} samples and {twice:.6g} for the same samples twice"
    if abs(ratio - 1) <= _SAME[experiment.precision]:
        raise UserError(
            f"{found}: it averages, so a micro-batch of {batches.cut.micro_batch} samples would count as one sample; "
            "let it return the sum over the samples, by reduction='sum', or its mean times the number of samples"
        )
    if abs(ratio - 2) > _DOUBLED:
        job.console.say(
            f"warning: {found}, and a sum over samples would double: a part of it, such as a regulariser, does not "
            "count per sample, and the weight of that part depends on micro_batch"
        )


def try_metrics(
    model: nn.Module,
    forward: Callable[[Tree, Tree], tuple[Tree, Tree, Tensor]],
    metrics: OwnMetrics,
    dataset: Dataset,
    collate: Collate | None = None,
) -> dict[str, Any]:
    """Evaluate a batch of two samples and one of one, so that metrics which fail do so now, not after an epoch.

    Returns the figures. Raises what `evaluate` raises.
    """
    few = first_items(dataset, 3)
    device = next(model.parameters()).device
    with unchanged(model, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so few samples, many figures are not defined
        alone, tried = Collectives(World(), device), replace(metrics, are_tried=True)
        return evaluate(model, forward, None, few, Evaluation(samples_per_batch=2), alone, collate, tried)


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into eval mode; put its modes, buffers, attributes and all random numbers back afterwards."""
    state = ForwardState(model)
    with generators_kept(device):
        model.eval()
        try:
            yield
        finally:
            state.put_back()
