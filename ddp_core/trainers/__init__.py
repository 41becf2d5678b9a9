"""The training loop, and the trainers that compute a step's gradients: single, dp, and ddp, also sharded."""

from ddp_core.sharding import Sharding
from ddp_core.trainers.job import Job
from ddp_core.trainers.trainer import Trainer


def build_trainer(job: Job) -> Trainer:
    """The trainer for the job's layout."""
    if job.layout.kind == "single":
        from ddp_core.trainers.single import SingleTrainer

        return SingleTrainer(job)
    if Sharding.of(job.layout).is_any:
        from ddp_core.trainers.sharded import ShardedTrainer

        return ShardedTrainer(job)
    if job.layout.kind == "ddp":
        from ddp_core.trainers.distributed import DistributedTrainer, PlainDistributedTrainer

        return (DistributedTrainer if job.options.reduction == "exact" else PlainDistributedTrainer)(job)
    from ddp_core.trainers.data_parallel import CudaDataParallelTrainer, DataParallelTrainer

    # nn.DataParallel chooses no order of additions, and on CPU it has no replicas.
    is_torchs = job.layout.device == "cuda" and job.options.reduction == "plain"
    return (CudaDataParallelTrainer if is_torchs else DataParallelTrainer)(job)


__all__ = ["Job", "Trainer", "build_trainer"]
