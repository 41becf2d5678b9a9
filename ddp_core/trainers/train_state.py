"""What a checkpoint holds, and when one is due: the state that a resumed run needs, and what saves it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.base.errors import ExitCode, UserError, nearest_name
from ddp_core.base.torch_internals import writes_to
from ddp_core.base.user_code import user_code
from ddp_core.checkpoint import whole_tensors
from ddp_core.checkpoint.queues import without_queues
from ddp_core.model.averaging import WeightAverage
from ddp_core.model.optimizers import require_saveable
from ddp_core.observe.callback import Callback
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.sharding import Ownership, OwnsAll
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job


def score_of(evaluation: dict[str, Any], best: str | None) -> float:
    """How good the figures are: more is better, and NaN is never the best.

    Raises UserError where no number has the name that `best`, the experiment's, asks for.
    """
    if best is None:
        return float(evaluation.get("test_accuracy", -evaluation.get("test_loss", math.nan)))
    mode, name = best.split()
    numbers = [each for each, value in evaluation.items() if isinstance(value, int | float | None)]
    full = name if name in numbers else f"test_{name}"
    if full not in numbers:
        hint = nearest_name(full, numbers) if numbers else "the experiment has no held-out samples"
        raise UserError(f"best is {best!r}, but the evaluation has no number {name}; {hint}")
    value = math.nan if evaluation[full] is None else float(evaluation[full])
    return value if mode == "max" else -value


@dataclass
class TrainState:
    """The record that a checkpoint holds: weights, optimizer and the like, and the position.

    Random state follows from the position. `step` counts finished optimizer steps over the whole run.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    schedule: LRScheduler | None = None
    """The experiment's own; a built-in rule has no state."""
    average: WeightAverage | None = None
    callbacks: Sequence[Callback] = ()
    learning_rate: float = math.nan
    """Used by the last update, of the first parameter group; not saved."""
    step: int = 0
    epoch_loss: float = 0.0
    """Sum of the losses of all samples trained in the epoch so far."""
    epoch_samples: int = 0
    last_epoch_loss: float | None = None
    """Mean loss over the samples of the last whole epoch."""
    best: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)
    trained_seconds: float = 0.0
    trained_samples: int = 0
    ended_early: str | None = None
    """Why a callback has ended the run after this step; None where none has."""
    ownership: Ownership = field(init=False)
    """What this process has of weights and optimizer state: all of both, until they are cut."""
    _committed: tuple[bool, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.ownership = OwnsAll(self.model, self.optimizer)
        self.commit()
        self._built = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}

    def require_saveable(self, of_all_ranks: bool = False) -> None:
        """Raises UserError where the optimizer or the schedule has by now a state that no checkpoint can hold.

        A collective with `of_all_ranks`, which also looks at how the ranks' parts of it fit together.
        """
        state = self.ownership.own_state() if of_all_ranks else without_queues(self.optimizer.state_dict())
        require_saveable(state, f"your optimizer, {type(self.optimizer).__name__}, keeps a state")
        if self.schedule is not None:
            require_saveable(
                without_queues(self.schedule.state_dict()),
                f"your schedule, {type(self.schedule).__name__}, keeps a state",
            )

    def end_epoch(self) -> None:
        """Keep the mean loss over the epoch's samples, and start to count the next epoch's."""
        if self.epoch_samples:
            self.last_epoch_loss = self.epoch_loss / self.epoch_samples
        self.epoch_loss, self.epoch_samples = 0.0, 0

    def take_evaluation(self, evaluation: dict[str, Any], best: str | None = None) -> bool:
        """Keep an evaluation's figures; returns whether they are the best so far, as the experiment's `best` has it.

        Raises UserError where the evaluation has no number of that name.
        """
        self.evaluation = evaluation
        score = score_of(evaluation, best)
        if math.isnan(score) or (self.best is not None and score <= self.best):
            return False
        self.best = score
        return True

    def state_dict(self, in_parts: bool = False) -> dict[str, Any]:
        """The state in nested dictionaries of tensors and plain JSON types.

        Where something is sharded, a collective; its state is then whole on rank 0, and None on the other ranks.
        With `in_parts` it is on every rank a tree with CutTensors of what this rank has, and no tensor is sent.
        """
        owned = self.ownership
        return {
            "model": owned.own_weights() if in_parts else owned.whole_weights(),
            "optimizer": owned.own_state() if in_parts else owned.whole_state(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "schedule": None if self.schedule is None else without_queues(self.schedule.state_dict()),
            "average": self.averages(in_parts),
            "callbacks": self.states_of_callbacks(),
            "requires_grad": {
                name: parameter.requires_grad
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad != self._built[name]
            },
            "position": self._position(),
        }

    def commit(self, is_settled: bool = True) -> None:
        """Keep the position as that of a moment to which a step that is not finished can go back."""
        self._committed = is_settled, self._position()

    @property
    def is_settled(self) -> bool:
        """Whether what follows the update of step `step` is done, too: an evaluation, a digest, a save."""
        return self._committed[0]

    @property
    def committed_at(self) -> tuple[int, bool]:
        """The step of the last `commit`, and whether it was settled."""
        return self._committed[1]["step"], self.is_settled

    def committed(self) -> dict[str, Any]:
        """The state of the last `commit`; whole weights only, and to be called when the reduction is closed.

        A step that was not finished has changed nothing else by then: weights, optimizer, average, scaler and schedule
        change in the update alone, which waits for no rank; buffers are put back by the trainer.
        """
        return {**self.state_dict(), "position": self._committed[1]}

    def _position(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch_loss": self.epoch_loss,
            "epoch_samples": self.epoch_samples,
            "last_epoch_loss": self.last_epoch_loss,
            "best": self.best,
            "evaluation": self.evaluation,
            "trained_seconds": self.trained_seconds,
            "trained_samples": self.trained_samples,
            "ended_early": self.ended_early,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned for all ranks; in the place of tensors there may be whole CutTensors."""
        with user_code("your model"):
            self.ownership.load_weights(state["model"])
        with user_code("your optimizer"):
            self.ownership.load_state(state["optimizer"])
        for name in ("scaler", "schedule", "average"):
            part = getattr(self, name)
            if part is not None and state.get(name) is not None:
                with user_code(f"your {name}"):
                    part.load_state_dict(whole_tensors(state[name]))
        with user_code("your callback"):
            for name, callback in self.named_callbacks():
                if name in state.get("callbacks", {}):
                    callback.load_state_dict(whole_tensors(state["callbacks"][name]))
        parameters = dict(self.model.named_parameters())
        for name, flag in state.get("requires_grad", {}).items():
            parameters[name].requires_grad_(flag)
        for name, value in state["position"].items():
            setattr(self, name, value)
        self.commit()

    def named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        """The callbacks by class and position: one that the code has exchanged since gets nothing of another one's."""
        for position, callback in enumerate(self.callbacks):
            yield f"{position} {type(callback).__qualname__}", callback

    def states_of_callbacks(self) -> dict[str, Any]:
        """What callbacks want to be kept. Raises UserError where a checkpoint could not hold it."""
        kept = {}
        for name, callback in self.named_callbacks():
            with user_code("your callback"):
                state = callback.state_dict()
            if state:
                require_saveable(state, f"callback {type(callback).__name__} has a state_dict")
                kept[name] = state
        return kept

    def averages(self, in_parts: bool) -> dict[str, Any] | None:
        """The state dict of the averaged weights, whole on all ranks; with `in_parts` cut as the weights are."""
        if self.average is None:
            return None
        state: dict[str, Any] = self.average.state_dict()
        if in_parts:
            own = self.ownership.own_weights(self.average.module)
            state.update({f"module.{name}": value for name, value in own.items()})
        return state


class Saving(StepObserver):
    """Saves checkpoints of the state: rank 0 writes them, and the other ranks only wait where that is asked for.

    Where the state is sharded among ranks, each rank writes its part.
    """

    def __init__(self, job: Job, state: TrainState, clock: StepClock, steps_per_epoch: int) -> None:
        self._job, self._state, self._clock, self._steps_per_epoch = job, state, clock, steps_per_epoch
        self._every = job.options.checkpoint_every
        self._counts: dict[str, int] = {}
        """How many writes torch has counted for each parameter, as this step began."""
        self._looks: bool | None = None
        """Whether writes to parameters are looked for in this step; None before the first one."""
        self._written: set[str] = set()
        """The parameters that a step has written to before its update, such as a forward that clamps its weights."""
        self._aside_step: int | None = None
        """The step of the last checkpoint that is copied while training goes on."""
        self.newest_step = 0
        """The step of the newest checkpoint; 0 where there is none."""

    @property
    def newest(self) -> str:
        """What a message says of the newest checkpoint."""
        return (
            f"the checkpoint of step {self.newest_step} is good" if self.newest_step else "nothing has been saved yet"
        )

    def before_step(self, batch: StepBatch) -> None:
        # A thousand counters take a millisecond, so they are read around saves alone, and once before the first one.
        step, saves = self._state.step, self._job.checkpointer is not None
        self._looks = saves and (self._looks is None or self._aside_step == step or self.is_due(step + 1))
        if self._looks:
            self._counts = self._writes()

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        if self._job.checkpointer is not None:
            if self._looks:
                now = self._writes()
                self._learn_written([name for name in now if now[name] != self._counts.get(name)])
            self._job.checkpointer.before_update()

    def after_step(self, batch: StepBatch) -> None:
        if self._job.checkpointer is not None:
            self._job.checkpointer.check()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps: every `checkpoint_every` steps, else at each epoch's end.

        Also where one is kept for an audit.
        """
        kept = self._job.kept_every
        return step % (self._every or self._steps_per_epoch) == 0 or (kept is not None and step % kept == 0)

    def _writes(self) -> dict[str, int]:
        return {name: writes_to(parameter) for name, parameter in self._state.model.named_parameters()}

    def _learn_written(self, names: list[str]) -> None:
        """Let later saves copy these parameters at once; warns of one that was saved aside while they were written."""
        if new := [name for name in names if name not in self._written]:
            self._written.update(new)
            if self._aside_step == self._state.step:
                self._job.console.say(
                    f"warning: step {self._state.step + 1} is the first in which forward or a callback writes to "
                    f"{', '.join(new)}, so the checkpoint of step {self._state.step}, which was copied meanwhile, may "
                    "hold what it wrote; later ones will not, and --synchronous-save copies each at once"
                )

    def _changing(self) -> list[Tensor]:
        """What may change before the next update: buffers, and the parameters that steps write to."""
        # What cuts parameters among ranks (DTensor) does not let a forward write to what it keeps.
        written = (
            parameter
            for name, parameter in self._state.model.named_parameters()
            if name in self._written and type(parameter.detach()) is Tensor
        )
        return [*self._state.model.buffers(), *written]

    def wait(self) -> None:
        """Return once the last checkpoint is written, on the ranks that write."""
        if self._job.checkpointer is not None:
            self._job.checkpointer.wait()

    def save(self, best: bool = False, wait: bool = False) -> None:
        """Save a checkpoint after the step just done; with `wait`, all ranks return once it is written.

        Raises UserError (5), on every rank, where a weight is NaN or infinite: gradients can be so though no loss is.
        Raises UserError (2) for an optimizer whose state no checkpoint can hold.
        """
        job, state, before = self._job, self._state, time.perf_counter()
        with self._clock.aside("checkpoint"):
            bad = first_not_finite(state.ownership.trained)
            if not state.ownership.has_whole_weights:
                # Each rank has looked at what it owns.
                bad = next(filter(None, job.collectives.gather(bad)), None)
            if bad:
                raise UserError(
                    f"parameter {bad} is not finite after step {state.step}, so this step is not saved, "
                    f"{self.newest}: lower optimizer.lr, or set clip_norm",
                    ExitCode.NUMERICS,
                )
            if job.checkpointer is not None:
                try:
                    job.checkpointer.save(
                        state.state_dict(in_parts=job.layout.saves_in_parts),
                        step=state.step,
                        epoch=state.step // self._steps_per_epoch,
                        metadata={"experiment_sha256": job.experiment.digest(), "layout": job.layout.label},
                        metric=state.best if best else None,
                        best=best,
                        changing=self._changing(),
                    )
                except (TypeError, ValueError):
                    state.require_saveable()
                    raise
                self._aside_step = state.step if job.checkpointer.asynchronous and not wait else None
            if wait:
                self.wait()
                job.collectives.barrier()
        self.newest_step = state.step
        job.metrics.write("checkpoint", step=state.step, seconds=time.perf_counter() - before)


def first_not_finite(trained: Mapping[str, Tensor]) -> str | None:
    """The name of the first of these parameters with a NaN or infinite element; None where there is none.

    Buffers and frozen parameters are not looked at: a mask holds -inf on purpose.
    """
    trained = {name: each for name, each in trained.items() if each.numel()}
    # One norm of all, because the host then waits for the device once. It may overflow though no element is infinite.
    if math.isfinite(nn.utils.get_total_norm(list(trained.values())).item()):
        return None
    return next((name for name, each in trained.items() if not each.isfinite().all()), None)
