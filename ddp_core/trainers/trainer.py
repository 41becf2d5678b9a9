"""The loop that every layout shares: load, compute gradients, update, evaluate, save, stop."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.keyed_draws import without_key
from ddp_core.base.seeds import EvaluationSeed, MicroBatchSeed, generators_kept
from ddp_core.config.cut import BatchCut, MicroBatch
from ddp_core.config.experiment import Optimizer
from ddp_core.data.loader import Loader
from ddp_core.data.splits import first_items
from ddp_core.data.trees import Tree
from ddp_core.distributed.membership import Regroup
from ddp_core.distributed.stop import ASKED_ELSEWHERE, Stopped
from ddp_core.model.averaging import WeightAverage
from ddp_core.model.builders import lay_out
from ddp_core.model.forward_state import ForwardState
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.step import StepBatch, StepObservers, StepReport
from ddp_core.reduction import clip_gradients_, gradient_norm
from ddp_core.reduction.refusal import DependsOnLayout
from ddp_core.reduction.trained import TrainedParameters, describe_changes
from ddp_core.reduction.written_parameters import WrittenParameters
from ddp_core.trainers.batches import Batches
from ddp_core.trainers.callback_calls import CallbackCalls, Method
from ddp_core.trainers.checks import Guard
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.evaluation import evaluate
from ddp_core.trainers.figures import Figures
from ddp_core.trainers.job import Job
from ddp_core.trainers.noting import StepNotes, state_digests
from ddp_core.trainers.passes import Passes, WeightUpdate, require_scalable
from ddp_core.trainers.saving import Saving
from ddp_core.trainers.step_losses import (
    BufferCopies,
    LossGate,
    StepLosses,
    first_bad,
    name_bad_loss,
    steps_between_reading,
)
from ddp_core.trainers.torch_errors import note_samples
from ddp_core.trainers.train_state import TrainState
from ddp_core.trainers.witness import Witnessed

if TYPE_CHECKING:
    from ddp_core.reduction import ExactReduction
    from ddp_core.reduction.plain import PlainReduction
    from ddp_core.sharding.plain_rounds import PlainRounds

TRIED_BATCHES = 2
"""How many batches an evaluation has where the run is only tried."""


class Trainer(ABC):
    """One experiment on one layout; a subclass computes the gradients of a step.

    After `train` the model holds the final weights, and `state` holds everything that a checkpoint does.
    """

    reduction: ExactReduction | PlainReduction | PlainRounds
    """Adds up gradients, in trainers that need not do it themselves."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.experiment, self.options, self.device = job.experiment, job.options, job.device
        self.exact = job.options.reduction == "exact"
        self.model = lay_out(job.model.to(job.device), job.experiment.memory_format)
        self.cut = BatchCut.of(job.experiment, job.layout)
        loader = Loader(
            job.splits.train,
            job.splits.augmentation,
            job.experiment.seed,
            workers=job.options.workers,
            collate=job.splits.collate,
            device=job.device,
        )
        world = job.collectives.world
        # A process has the share of its rank; the only process of `dp` has all shares, one for each replica.
        shares = range(world.rank, self.cut.shares, world.world_size)
        self.batches = Batches(job.experiment, self.cut, job.splits.trained, loader, shares)
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = job.experiment.total_steps(self.steps_per_epoch)
        if job.only_steps is not None:
            self.total_steps = min(self.total_steps, job.only_steps)
        self.seed_micro_batch = MicroBatchSeed(job.experiment.seed, job.device)
        self.losses = StepLosses(job.collectives, self.cut.micro_batches)
        kind = Passes
        if job.options.cuda_graph:
            from ddp_core.trainers.graphed import GraphedPasses

            kind = GraphedPasses
        self.passes = kind(job.experiment, job.loss, job.device)
        if self.passes.scaler is not None:
            require_scalable(self.model)
        self.state = self._fresh_state()
        self.trained = TrainedParameters(self.model)
        self._read_every = steps_between_reading(job.options, self.state, job.device, job.makes_room is not None)
        self._gate = LossGate(self.state.optimizer, job.device) if self._read_every > 1 else None
        held_back = None if self._gate is None else self._gate.closed
        self.update = WeightUpdate(job.experiment, self.state, self.steps_per_epoch, self.clip_gradients, held_back)
        # Where parameters are cut, others take their place, and a hook on these would be lost.
        is_watched = not job.options.cuda_graph and job.layout.shard != "parameters"
        overlaps = world.world_size > 1 and is_watched
        self.clock = StepClock(self.model if overlaps else None, job.device)
        self.saving = Saving(job, self.state, self.clock, self.steps_per_epoch, self.total_steps)
        self.figures = Figures(job, self.state, self.clock, self.total_steps)
        takes_back = job.options.on_nan == "skip" or job.makes_room is not None
        self._copies = BufferCopies(self.model) if takes_back else None
        copies = [self._copies] if self._copies is not None else []
        self.callbacks = CallbackCalls(job, self.state)
        called = [self.callbacks] if self.callbacks.has_any else []
        self.guard = Guard(job, self.state, self.clock, self.saving)
        self.witnessed = Witnessed(job, self.state, self.saving, self.guard)
        notes: list[StepNotes] = []
        if job.noted_in is not None:
            notes = [StepNotes(self.state, job.layout.saves_in_parts, job.in_miniature, job.noted_in, world.rank)]
        ours = [self.clock, self.saving, self.figures, *copies, *called]
        # The notes come after the callbacks, which may change weights.
        self.observers = StepObservers([*ours, self.witnessed, *notes, *job.observers])

    @abstractmethod
    def compute_gradients(self, batch: StepBatch) -> None:
        """Forward, backward, reduction: leaves the mean gradient over the global batch in every `.grad`."""

    @contextlib.contextmanager
    def micro_batch(self, batch: StepBatch, part: MicroBatch) -> Iterator[None]:
        """Run forward and backward of one micro-batch inside: seeded, and reduced.

        For trainers that have a `reduction`.
        """
        self.seed_micro_batch(batch.step, part.index)
        with self.reduction.micro_batch(part.index, part.stop - part.start):
            yield

    def write_along(self, batch: StepBatch) -> None:
        """Run the forward of micro-batch 0 in a step that has no micro-batch for this model: it may write to weights.

        One that clamps them would else leave other weights here than elsewhere. Nothing else is left of it.
        """
        if not self.exact or not self.state.ownership.has_whole_weights or self.options.cuda_graph:
            return
        part = self.cut.parts(batch.samples)[0]
        ids, key = self.batches.ids(batch.step, part), self.batches.key(batch.step, part)
        before = ForwardState(self.model)
        with generators_kept(self.device):
            self.seed_micro_batch(batch.step, part.index)
            self.passes.loss(self.model, *self.batches.loader.fetch(batch.epoch, ids, key))
        before.put_back()

    def send_losses(self, batch: StepBatch) -> None:
        """Send the step's losses, and whether this process was asked to stop.

        Called once per step on every rank, after its last forward and before it waits for another rank.
        """
        self.observers.before_wait()
        leaves = self.job.stop.requested or (self.job.makes_room is not None and self.job.makes_room())
        self.losses.send(batch, leaves)

    def clip_gradients(self, max_norm: float) -> None:
        """Limit the norm of the gradient; overridden where a rank has a part of it."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.exact:
            clip_gradients_(parameters, gradient_norm(parameters), max_norm)
        else:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def follow_trained(self) -> None:
        """Train from this step on what the model's flags `requires_grad` say, on every rank.

        Raises UserError where ranks differ, where the optimizer would not update a parameter that is trained now, and
        where nothing is trained any more.
        """
        changes = self.trained.changes()
        if not changes:
            return
        self.refuse_to_retrain(changes)
        same = self.losses.all_join() and len({*map(str, self.job.collectives.gather(changes))}) == 1
        if not same:
            raise UserError(
                f"{self.where}: {describe_changes(changes)}, and not the same on all ranks: a callback that changes "
                'requires_grad needs `ranks = "all"` and must do the same on each rank'
            )
        updated = {id(each) for group in self.state.optimizer.param_groups for each in group["params"]}
        for name, parameter in self.model.named_parameters():
            parameter.grad = None  # that of the last step would go on changing a parameter that is frozen now
            if parameter.requires_grad and id(parameter) not in updated:
                raise UserError(
                    f"{self.where}: {name} is trained now, but no group of the optimizer has it, so it would stay as "
                    "it is: let the experiment's own `optimizer` take all of the model's parameters"
                )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UserError(
                f"{self.where}: {describe_changes(changes)}, so that nothing is trained any more: leave one parameter"
            )
        self.retrain()
        self.trained = TrainedParameters(self.model)
        self.job.console.say(f"from step {self.state.step + 1} on: {describe_changes(changes)}")

    def refuse_to_retrain(self, changes: dict[str, bool]) -> None:  # noqa: B027
        """Raise UserError where what is trained cannot change; overridden where parameters are cut."""

    def retrain(self) -> None:  # noqa: B027
        """Make anew what depends on which parameters are trained; overridden where something does."""

    def settle_buffers(self) -> None:  # noqa: B027
        """Make the buffers equal on all ranks; overridden where the reduction does not do so."""

    def close(self) -> None:  # noqa: B027
        """End threads and drop everything that refers to the process group; does nothing by default."""

    def train(self, saved_step: int | None = None) -> None:
        """Train from `state.step` to the end. Raises Stopped, UserError, or what the model raised.

        `saved_step`: the step of the newest checkpoint (0: there is none); None where the state came from it, or is
        that of step 0. Raises Regroup where this rank leaves its group to let another one in.
        """
        self.saving.newest_step = self.state.step if saved_step is None else saved_step
        self.guard.begin()
        self.callbacks.begin()
        self.clock.restart()
        if not self.state.is_settled:
            # A rank was lost after the update.
            step = self.state.step - 1
            batch = StepBatch(step, step // self.steps_per_epoch, self.batches.samples_of(step), [], [], [])
            self.seed_micro_batch.update(step)
            self.callbacks.after_step(batch)
            self.settle(batch)
        # A run that ended early may have been lost after its last save, and before its record said so.
        end = self.state.step if self.is_at_end else self.total_steps
        # After an error the device may wait for a lost peer. It is freed before anything is closed that may wait for
        # the device: the stream's thread, and what the caller closes.
        with (
            contextlib.closing(self.batches.starting_at(self.state.step, end)) as stream,
            self.job.collectives.abandoned_on_error(),
            without_key(),
            self._taking_back(),
        ):
            for batch in stream:
                self.observers.before_step(batch)
                self.follow_trained()
                try:
                    self.compute_gradients(batch)
                except DependsOnLayout as error:
                    raise UserError(f"{self.where}: {error}") from None
                except Exception as error:
                    note_samples(error, batch)
                    raise
                stop, reports = self.receive_losses(batch)
                self.seed_micro_batch.update(batch.step)
                self.observers.gradients_done(batch, reports)
                bad = first_bad(reports)
                if bad is None:
                    self.update_weights(batch)
                else:
                    self.skip_update(batch, bad)
                self.state.step += 1
                self.state.commit(is_settled=False)
                self.observers.after_step(batch)
                self.settle(batch)
                if self.is_at_end:
                    break
                if stop:
                    self.stop()
            self.witnessed.end()
        if self.callbacks.has_any:
            self.saving.wait()
            self.callbacks.end((self.state.step - 1) // self.steps_per_epoch)

    @contextlib.contextmanager
    def _taking_back(self) -> Iterator[None]:
        """A block after whose error the buffers are as before the step that was not finished, in a live recovery.

        The reduction writes batch-norm statistics before the losses have come, and another rank may be lost between.
        """
        try:
            yield
        except Exception:
            if self._copies is not None and self._copies.step == self.state.step:
                self._copies.put_back()
            raise

    def settle(self, batch: StepBatch) -> None:
        """Do what follows an update, where it is due: evaluate, record a digest, compare ranks, save."""
        self.agree_to_end("on_step", batch)
        is_best = self.end_epoch(batch) if self.is_at_epoch_end else False
        if self.is_digest_due:
            self.record_digest()
        self.guard.step_done()
        is_due = is_best or self.is_at_end or self.saving.is_due(self.state.step)
        if is_due and self.saving.newest_step < self.state.step:  # a lost rank 0 may have saved this step
            self.witnessed.before_save()
            self.save(best=is_best)
        if self.job.collectives.world.is_first:
            self.state.commit()  # what the others have done here leaves no trace: only rank 0 writes
        self.callbacks.share()

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left to train: all steps are done, or a callback has ended the run."""
        return self.state.step == self.total_steps or self.state.ended_early is not None

    @property
    def where(self) -> str:
        """Which step this is, and which process, in words."""
        return f"step {self.state.step + 1}, {self.job.collectives.world.place}"

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether an epoch has just ended; `max_steps` may cut the last epoch short."""
        return self.is_at_end or self.state.step % self.steps_per_epoch == 0

    @property
    def is_digest_due(self) -> bool:
        """Whether a digest of the weights is due: at the end of an epoch, and every `digest_every` steps."""
        every = self.options.digest_every
        return self.is_at_epoch_end or (every is not None and self.state.step % every == 0)

    def receive_losses(self, batch: StepBatch) -> tuple[bool, list[StepReport]]:
        """Whether a rank was asked to stop, and the reports of all steps not read yet; none where that is not due."""
        stop = self.losses.receive()
        if self._gate is not None:
            self._gate.see(self.losses.newest)
        done = batch.step + 1
        is_due = stop or done % self._read_every == 0 or done % self.steps_per_epoch == 0 or done == self.total_steps
        # Losses are read before every save, so that no checkpoint is saved after a bad loss.
        return stop, self.losses.read() if is_due or self.saving.is_due(done) else []

    def update_weights(self, batch: StepBatch) -> None:
        """Set the learning rate, clip the gradients, update the weights."""
        self.update.make(batch.step)

    def skip_update(self, batch: StepBatch, bad: StepReport) -> None:
        """Leave the weights as they are and say why. Raises UserError (5) unless `on_nan` is skip."""
        message = name_bad_loss(bad, self.batches, self.job.layout)
        if self.options.on_nan == "stop":
            seen = f" (seen after step {batch.step + 1}, no update was made since)" if batch.step > bad.step else ""
            raise UserError(
                f"{message}; stopped before the optimizer step{seen}, {self.saving.newest}: look at these "
                "samples, lower optimizer.lr, or use --on-nan skip",
                ExitCode.NUMERICS,
            )
        self.job.console.say(f"{message}; step skipped")
        self.observers.skipped(batch)

    def end_epoch(self, batch: StepBatch) -> bool:
        """Keep the epoch's mean loss, and evaluate where that is due; returns whether the result is the best so far."""
        self.figures.epoch_done(batch)
        self.state.end_epoch()
        with self.clock.aside():
            self.settle_buffers()
            is_due = self.is_at_end or (batch.epoch + 1) % self.experiment.evaluation.every_epochs == 0
            is_best = is_due and self.evaluate_epoch(batch)
            self.callbacks.epoch_done(batch.epoch, is_due)
            self.agree_to_end("on_epoch", batch)
            if self.is_at_end and not is_due:
                is_best = self.evaluate_epoch(batch)
            return is_best

    def evaluate_epoch(self, batch: StepBatch) -> bool:
        """Evaluate and record the figures; returns whether they are the best so far."""
        if not self.state.evaluation and self.job.only_steps is None:
            from ddp_core.trainers.young_statistics import young_statistics

            if (line := young_statistics(self.model)) is not None:
                self.job.console.say(line)
        is_best = self.state.take_evaluation(self.evaluate(), self.experiment.best)
        self.seed_micro_batch.after_evaluation(batch.epoch)
        self.figures.evaluated(batch)
        return is_best

    def agree_to_end(self, method: Method, batch: StepBatch) -> None:
        """End the run here, on every rank, where a callback has asked for it in this method."""
        if self.is_at_end or (reason := self.callbacks.agreed_end(method)) is None:
            return
        self.state.ended_early = reason
        # On CUDA, some losses may be unread still: the epoch's mean is over all of them, and none may be bad.
        reports = self.losses.read()
        if (bad := first_bad(reports)) is not None:
            self.skip_update(batch, bad)
        self.figures.gradients_done(batch, reports)

    def evaluate(self) -> dict[str, Any]:
        """The figures over the held-out samples, `ema_` before those of averaged weights; the same on every layout."""
        batches = TRIED_BATCHES if self.job.is_tried else None
        figures = self._figures_of(self.model, batches)
        if self.state.average is not None:
            averaged = self._figures_of(self.state.average.module, batches)
            figures |= {f"ema_{name}": value for name, value in averaged.items()}
        return figures

    def _figures_of(self, model: nn.Module, batches: int | None = None) -> dict[str, Any]:
        """Loss, for classification accuracy, and the experiment's own metrics; of the first `batches` where given."""
        job, splits = self.job, self.job.splits
        if splits.test is None:
            return {}
        settings = self.experiment.evaluation

        def forward(inputs: Tree, targets: Tree) -> tuple[Tree, Tree, Tensor]:
            with self.state.ownership.forward_alone():
                return self.passes.outputs_and_loss(model, inputs, targets)

        try:
            return evaluate(
                model,
                forward,
                job.hits,
                splits.test if batches is None else first_items(splits.test, batches * settings.samples_per_batch),
                settings,
                job.collectives,
                splits.collate,
                job.own_metrics,
                keep_pace=not self.state.ownership.has_whole_weights,
                seed=EvaluationSeed(self.seed_micro_batch, (self.state.step - 1) // self.steps_per_epoch),
                written=WrittenParameters(model, "evaluation batch") if self.exact else None,
            )
        except DependsOnLayout as error:
            place = job.collectives.world.place
            raise UserError(f"evaluation after step {self.state.step}, {place}: {error}") from None
        finally:
            self.state.ownership.forwards_done()

    def _fresh_state(self) -> TrainState:
        """The state before the first step."""
        job, settings, decay = self.job, self.experiment.optimizer, self.experiment.ema_decay
        optimizer = job.optimizer
        if optimizer is None:
            assert isinstance(settings, Optimizer), (
                "an optimizer of the experiment's own is built by whoever makes the job"
            )
            optimizer = build_optimizer(settings, self.model, self.experiment.global_batch_size)
        # A copy of the model as it is now: the reduction and the clock have hooked nothing into it yet.
        average = None if decay is None else WeightAverage(self.model, decay)
        return TrainState(self.model, optimizer, self.passes.scaler, job.schedule, average, job.callbacks)

    def record_digest(self) -> None:
        """Write the digest of the weights (rank 0)."""
        with self.clock.aside("other"):
            weights = self.state.ownership.whole_weights()
            if self.job.collectives.world.is_first and weights is not None:
                digest = weights_digest(weights)
                self.job.metrics.write("digest", step=self.state.step, weights_sha256=digest)

    def save(self, best: bool = False, wait: bool = False) -> None:
        """Save a checkpoint after the step just done, as `Saving.save` says; one for an audit is noted first."""
        every, step = self.job.kept_every, self.state.step
        if every is not None and (step % every == 0 or self.is_at_end):
            with self.clock.aside("checkpoint"):
                state = self.state.state_dict(in_parts=self.job.layout.saves_in_parts)
                whole = self.state.ownership.whole_on_first(state)
                if self.job.note_kept is not None and whole is not None:
                    self.job.note_kept(step, state_digests(whole))
        self.saving.save(best=best, wait=wait)

    def stop(self) -> None:
        """Save, wait for all ranks, and raise Stopped; or Regroup, where the ranks only make room for another one."""
        if self.job.makes_room is not None and not any(self.job.collectives.gather(self.job.stop.requested)):
            raise Regroup
        self.guard.require_same_state()
        self.save(wait=True)
        self.job.stop.saved()
        raise Stopped(self.job.stop.reason or ASKED_ELSEWHERE, self.state.step)
