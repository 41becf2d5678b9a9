"""The training loop, and the strategies that compute a step's gradients: single, dp, and ddp, also sharded."""

from ddp_core.trainers.assemble import Trainer, build_trainer
from ddp_core.trainers.job import Job, RunAccess, Trial

__all__ = ["Job", "RunAccess", "Trainer", "Trial", "build_trainer"]
