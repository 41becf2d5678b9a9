"""Puts a trainer together: the state, a layout's strategy, the loop, and the observers in their order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from ddp_core.config.cut import BatchCut
from ddp_core.data.loader import Loader
from ddp_core.model.averaging import WeightAverage
from ddp_core.model.builders import lay_out
from ddp_core.observe.step import StepObserver, StepObservers
from ddp_core.sharding import Sharding
from ddp_core.trainers.batches import Batches
from ddp_core.trainers.callback_calls import CallbackCalls
from ddp_core.trainers.checks import Guard
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.evaluation import Evaluator
from ddp_core.trainers.figures import Figures, WeightDigests
from ddp_core.trainers.job import Job
from ddp_core.trainers.loop import Loop
from ddp_core.trainers.noting import StepNotes
from ddp_core.trainers.passes import Passes, WeightUpdate, require_scalable
from ddp_core.trainers.retraining import Retraining
from ddp_core.trainers.saving import Saving
from ddp_core.trainers.step_losses import BufferCopies, LossGate, StepLosses, end_or_skip, steps_between_reading
from ddp_core.trainers.strategy import SingleStrategy, Strategy
from ddp_core.trainers.train_state import Steps, TrainState
from ddp_core.trainers.witness import Witnessed


@dataclass(frozen=True)
class Trainer:
    """One experiment on one layout. After `train`, `state` holds the final weights and all that a checkpoint does."""

    job: Job
    state: TrainState
    steps: Steps
    strategy: Strategy
    loop: Loop
    clock: StepClock
    figures: Figures
    evaluator: Evaluator
    callbacks: CallbackCalls
    guard: Guard
    witnessed: Witnessed
    saving: Saving

    def train(self) -> None:
        """Train from `state.step` to the end; see `Loop.fit`."""
        self.loop.fit()

    def close(self) -> None:
        """End threads, and drop everything that refers to the process group."""
        self.strategy.close()


def build_trainer(job: Job) -> Trainer:
    """The trainer of a job, at step 0. Raises UserError where the layout cannot train this experiment."""
    passes = _passes(job)
    state = _fresh_state(job, passes)
    batches = _batches(job)
    total, only = job.experiment.total_steps(batches.steps_per_epoch), job.trial.only_steps
    steps = Steps(state, batches.steps_per_epoch, total if only is None else min(total, only))
    # Gradients are sent during backward, and a hook on parameters tells when the last one is done. Where parameters are
    # cut, others take their place, and a hook on these would be lost.
    is_watched = not job.options.cuda_graph and job.layout.shard != "parameters"
    overlaps = is_watched and job.collectives.world.world_size > 1
    clock = StepClock(state.model if overlaps else None, job.device)
    saving = Saving(job, clock, steps)
    guard = Guard(job, state, clock, saving)
    read_every = steps_between_reading(job.options, state, job.collectives)
    gate = LossGate(state.optimizer, job.device) if read_every > 1 else None
    losses = StepLosses(job.collectives, batches.cut.micro_batches, saving.may_save, read_every, gate)
    strategy = _strategy_of(job)(job, state, batches, passes, losses, clock, guard.compares_after)
    held_back = None if gate is None else gate.closed
    update = WeightUpdate(job.experiment, state, batches.steps_per_epoch, strategy.clip_gradients, held_back)
    figures = Figures(job, clock, steps)
    evaluator = Evaluator(strategy, steps)
    callbacks = CallbackCalls(job, steps, clock)
    witnessed = Witnessed(job, steps, saving, guard)
    # The clock counts what others take. An evaluation is printed with the epoch's mean loss, and callbacks get both.
    observers: list[StepObserver] = [clock, figures, evaluator]
    if job.options.on_nan == "skip" or job.collectives.takes_back:
        observers.append(BufferCopies(state))
    # What follows looks at weights, which callbacks may change. Nothing is saved that a check has not let pass.
    observers += [callbacks, WeightDigests(job, clock, steps), guard, witnessed]
    if job.trial.noted_in is not None:
        observers.append(StepNotes(job, state, job.trial.noted_in))
        if job.trial.operations_at is not None:
            from ddp_core.trainers.operations import OperationNotes

            observers.append(OperationNotes(strategy, job.trial.operations_at, job.trial.noted_in))
    # Anybody may freeze parameters before a step; that counts from this step on.
    observers += [saving, *job.observers, Retraining(strategy)]
    if job.layout.dealt == "auto" and not job.is_tried:
        from ddp_core.trainers.dealing import Dealing

        observers.append(Dealing(strategy, clock, steps))
    together = StepObservers(observers)
    losses.tell_wait = together.before_wait
    loop = Loop(strategy, update, steps, together, partial(end_or_skip, job, batches, saving))
    return Trainer(job, state, steps, strategy, loop, clock, figures, evaluator, callbacks, guard, witnessed, saving)


def _passes(job: Job) -> Passes:
    kind = Passes
    if job.options.cuda_graph:
        from ddp_core.trainers.graphed import GraphedPasses

        kind = GraphedPasses
    return kind(job.experiment, job.parts.loss, job.device)


def _fresh_state(job: Job, passes: Passes) -> TrainState:
    """The state before the first step."""
    experiment, parts = job.experiment, job.parts
    model = parts.model
    if experiment.sync_batch_norm and job.layout.kind == "ddp":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = lay_out(model.to(job.device), experiment.memory_format)
    if passes.scaler is not None:
        require_scalable(model)
    # A copy of the model as it is now: the reduction and the clock have hooked nothing into it yet.
    average = None if experiment.ema_decay is None else WeightAverage(model, experiment.ema_decay)
    return TrainState(model, parts.optimizer, passes.scaler, parts.schedule, average, parts.callbacks)


def _batches(job: Job) -> Batches:
    splits, world, cut = job.parts.splits, job.collectives.world, BatchCut.of(job.experiment, job.layout)
    loader = Loader(
        splits.train,
        splits.augmentation,
        job.experiment.seed,
        workers=job.options.workers,
        collate=splits.collate,
        device=job.device,
    )
    # A process has the share of its rank; the only process of `dp` has all shares, one for each replica.
    shares = range(world.rank, cut.shares, world.world_size)
    return Batches(job.experiment, cut, splits.trained, loader, shares, splits.weights)


def _strategy_of(job: Job) -> type[Strategy]:
    """The strategy of the job's layout; no other one is loaded."""
    if job.layout.kind == "single":
        return SingleStrategy
    if Sharding.of(job.layout).is_any:
        from ddp_core.trainers.sharded import ShardedStrategy

        return ShardedStrategy
    if job.layout.kind == "ddp":
        from ddp_core.trainers.distributed import DistributedStrategy, PlainDistributedStrategy

        return DistributedStrategy if job.is_exact else PlainDistributedStrategy
    from ddp_core.trainers.data_parallel import CudaDataParallelStrategy, DataParallelStrategy

    # nn.DataParallel chooses no order of additions, and on CPU it has no replicas.
    is_torchs = job.layout.device == "cuda" and not job.is_exact
    return CudaDataParallelStrategy if is_torchs else DataParallelStrategy
