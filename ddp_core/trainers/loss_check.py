"""Finds a loss that averages before the first step: nothing later shows that its gradients are too small.

The trainer adds up the losses of the micro-batches and divides by the samples of the global batch, so a loss has to be
a sum over samples. Two samples are evaluated, and then the same two twice in one batch: a sum doubles, a mean does not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ddp_core.base.errors import UserError
from ddp_core.model.losses import LOSSES
from ddp_core.trainers.trial import unchanged

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

_SAMPLES = 2  # many models cannot take a single one
_SAME = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}
"""How far the ratio of a mean may be from 1, by precision: the rounding of a sum depends on how many are added."""
_DOUBLED = 0.05
"""How far the ratio of a sum may be from 2."""


def check_loss(trainer: Trainer) -> None:
    """Warn of a loss that is no sum over samples. Raises UserError, on every rank, for one that averages.

    Everything is left as it was. There is no verdict where the loss cannot be computed so, or is 0 or not finite, and
    none is needed for the losses of `ddp_core` or for micro-batches of one sample, whose sum and mean are the same.
    """
    job, experiment = trainer.job, trainer.experiment
    if job.loss in LOSSES.values() or trainer.cut.micro_batch == 1:
        return
    once, twice = _losses(trainer)
    ratio = twice / once if once else math.nan
    if not math.isfinite(ratio):
        return
    found = f"loss {experiment.loss} gives {once:.6g} for {_SAMPLES} samples and {twice:.6g} for the same samples twice"
    if abs(ratio - 1) <= _SAME[experiment.precision]:
        raise UserError(
            f"{found}: it averages, so a micro-batch of {trainer.cut.micro_batch} samples would count as one sample; "
            "let it return the sum over the samples, by reduction='sum', or its mean times the number of samples"
        )
    if abs(ratio - 2) > _DOUBLED:
        job.console.say(
            f"warning: {found}, and a sum over samples would double: a part of it, such as a regulariser, does not "
            "count per sample, and the weight of that part depends on micro_batch"
        )


def _losses(trainer: Trainer) -> tuple[float, float]:
    """The loss of the first samples, and of each of them twice; NaN where it cannot be computed."""
    batches = trainer.batches
    ids = batches.order.ids(0, 0, min(_SAMPLES, batches.samples))
    with unchanged(trainer.model, trainer.device), torch.no_grad():
        try:
            once, twice = (
                float(trainer.passes.loss(trainer.model, *batches.loader.fetch(0, numbers)))
                for numbers in (ids, np.concatenate((ids, ids)))
            )
        except Exception:  # training meets it, too, and says on which rank
            return math.nan, math.nan
    return once, twice
