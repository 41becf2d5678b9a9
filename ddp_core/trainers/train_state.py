"""What a checkpoint holds: the state that a resumed run needs; and how many steps are still to be made from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.base.user_code import user_code
from ddp_core.checkpoint import whole_tensors
from ddp_core.checkpoint.state import without_queues
from ddp_core.model.averaging import WeightAverage
from ddp_core.model.optimizers import require_saveable
from ddp_core.observe.callback import Callback
from ddp_core.sharding import Ownership


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
class Position:
    """Where a training stands, and its figures up to there. Random state follows from it."""

    step: int = 0
    """How many steps are done over the whole run; one that was skipped counts."""
    epoch_loss: float = 0.0
    """Sum of the losses of all samples trained in the epoch so far."""
    epoch_samples: int = 0  # or what they weigh
    last_epoch_loss: float | None = None
    """Mean loss over the last epoch that has ended, which the end of the run may cut short."""
    best: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)
    trained_seconds: float = 0.0
    trained_samples: int = 0
    ended_early: str | None = None
    """Why a callback has ended the run after this step; None where none has."""

    def end_epoch(self) -> None:
        """Keep the mean loss over the epoch's samples, and start to count the next epoch's."""
        if self.epoch_samples:
            self.last_epoch_loss = self.epoch_loss / self.epoch_samples
        self.epoch_loss, self.epoch_samples = 0.0, 0


@dataclass
class TrainState:
    """The record that a checkpoint holds: weights, optimizer and the like, and the position."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    schedule: LRScheduler | None = None
    """The experiment's own; a built-in rule has no state."""
    average: WeightAverage | None = None
    callbacks: Sequence[Callback] = ()
    learning_rate: float = math.nan
    """Used by the last update, of the first parameter group; not saved."""
    position: Position = field(default_factory=Position)
    ownership: Ownership = field(init=False)
    """What this process has of weights and optimizer state: all of both, until they are cut."""
    _newest_evaluation: tuple[int, bool] = field(init=False, default=(-1, False))
    """The step after which an evaluation was made here, and whether it is the best so far; not saved."""
    is_settled: bool = field(init=False, default=True)
    """Whether what follows the update of step `step` is done, too: an evaluation, a digest, a save."""
    marked: Position = field(init=False)
    """The position of the last `mark`."""
    _kept_buffers: tuple[int, list[Tensor]] = field(init=False, default=(-1, []))
    """The step count at the last `keep_buffers`, and copies of the buffers then."""

    def __post_init__(self) -> None:
        self.ownership = Ownership(self.model, self.optimizer)
        self.mark()
        self._built = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}

    @property
    def step(self) -> int:
        """How many steps are done, over the whole run."""
        return self.position.step

    @step.setter
    def step(self, step: int) -> None:
        self.position.step = step

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

    def take_evaluation(self, evaluation: dict[str, Any], best: str | None = None) -> None:
        """Keep an evaluation's figures, and whether they are the best so far, as the experiment's `best` has it.

        Raises UserError where the evaluation has no number of that name.
        """
        self.position.evaluation = evaluation
        score, before = score_of(evaluation, best), self.position.best
        is_best = not math.isnan(score) and (before is None or score > before)
        if is_best:
            self.position.best = score
        self._newest_evaluation = self.step, is_best

    @property
    def is_evaluated(self) -> bool:
        """Whether an evaluation was made here after the newest step."""
        return self._newest_evaluation[0] == self.step

    @property
    def is_best(self) -> bool:
        """Whether an evaluation was made after the newest step, and its figures are the best so far."""
        return self._newest_evaluation == (self.step, True)

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
            "position": asdict(self.position),
        }

    def mark(self, is_settled: bool = True) -> None:
        """Keep the position as that of a moment to which a step that is not finished can go back."""
        self.is_settled, self.marked = is_settled, replace(self.position)

    def marked_state(self) -> dict[str, Any]:
        """The state of the last `mark`; whole weights only, and to be called when the reduction is closed.

        A step that was not finished has changed nothing else by then: weights, optimizer, average, scaler and schedule
        change in the update alone, which waits for no rank; buffers, which change before, are put back.
        """
        if self._kept_buffers[0] == self.step:
            self.put_back_buffers()
        return {**self.state_dict(), "position": asdict(self.marked)}

    def keep_buffers(self) -> None:
        """Keep copies of the buffers, until this is called again."""
        self._kept_buffers = self.step, [buffer.clone() for buffer in self.model.buffers()]

    @torch.no_grad()
    def put_back_buffers(self) -> None:
        """Give the buffers the values of the last `keep_buffers`."""
        for buffer, value in zip(self.model.buffers(), self._kept_buffers[1], strict=True):
            buffer.copy_(value)

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
        kept = state["position"]
        self.position = Position(**{each.name: kept[each.name] for each in fields(Position) if each.name in kept})
        self.mark()

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


@dataclass(frozen=True)
class Steps:
    """The steps of a run whose `state` counts those that are done."""

    state: TrainState
    per_epoch: int
    total: int
    """All steps, unless a callback ends the run earlier."""

    @property
    def are_done(self) -> bool:
        """Whether nothing is left to train: all steps are done, or a callback has ended the run."""
        return self.state.step == self.total or self.state.position.ended_early is not None

    @property
    def ends_epoch(self) -> bool:
        """Whether an epoch has just ended; the end of the run may cut the last one short."""
        return self.are_done or self.state.step % self.per_epoch == 0

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step that is done, counted from 0."""
        return (self.state.step - 1) // self.per_epoch
