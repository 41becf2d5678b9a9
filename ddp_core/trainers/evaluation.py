"""Evaluation: when a run has one, on what, and how it gives the same numbers on every layout.

Every held-out sample counts once. The batches are the same on every layout, and the ranks take them in turn. Each rank
fills in its own entries of a table of zeros, so the sum over ranks is exact, and `math.fsum` rounds once.
(DistributedSampler would pad the samples and count some of them twice.)

A forward may write to weights, such as one that clamps them. What every batch writes alike does no harm where every
rank has run one, so a rank without a batch then runs one, too; anything else is refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import EvaluationSeed
from ddp_core.base.trees import Collate, Tree
from ddp_core.base.user_code import user_code
from ddp_core.config.experiment import Evaluation
from ddp_core.data.loader import Loader
from ddp_core.data.splits import Dataset, Weights, first_items
from ddp_core.distributed.process_group import Collectives
from ddp_core.model.losses import Loss
from ddp_core.observe.metrics import readable
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.reduction.watching import DependsOnLayout, WrittenParameters
from ddp_core.trainers.strategy import Strategy
from ddp_core.trainers.train_state import Steps

if TYPE_CHECKING:
    from ddp_core.trainers.own_metrics import OwnFigures, OwnMetrics

TRIED_BATCHES = 2
"""How many batches an evaluation has where the run is only tried."""


class Evaluator(StepObserver):
    """Evaluates at the end of every `every_epochs`-th epoch, and of the run."""

    def __init__(self, strategy: Strategy, steps: Steps) -> None:
        self._strategy, self._steps = strategy, steps
        self._job, self._state, self._clock = strategy.job, strategy.state, strategy.clock

    def epoch_done(self, batch: StepBatch) -> None:
        with self._clock.aside():
            self._strategy.settle_buffers()
            if (batch.epoch + 1) % self._job.experiment.evaluation.every_epochs == 0 or self._steps.are_done:
                self._evaluate_epoch(batch)

    def settle(self, batch: StepBatch) -> None:
        # A callback may have ended the run after an epoch without an evaluation.
        if self._steps.are_done and not self._state.is_evaluated:
            with self._clock.aside():
                self._evaluate_epoch(batch)

    def _evaluate_epoch(self, batch: StepBatch) -> None:
        """Evaluate, keep the figures, write them to the metrics, and print them."""
        job, state = self._job, self._state
        state.take_evaluation(self.evaluate(), job.experiment.best)
        self._strategy.seeds.after_evaluation(batch.epoch)
        job.metrics.write("evaluation", step=state.step, epoch=batch.epoch, **state.position.evaluation)
        loss = state.position.last_epoch_loss
        figures = [*([] if loss is None else [f"train loss {loss:.4f}"]), *readable(state.position.evaluation)]
        job.console.say(f"epoch {batch.epoch + 1:3d}  step {state.step:6d}  " + "  ".join(figures))

    def evaluate(self) -> dict[str, Any]:
        """The figures over the held-out samples, `ema_` before those of averaged weights; the same on every layout."""
        figures = self._figures_of(self._state.model)
        if self._state.average is not None:
            averaged = self._figures_of(self._state.average.module)
            figures |= {f"ema_{name}": value for name, value in averaged.items()}
        return figures

    def _figures_of(self, model: nn.Module) -> dict[str, Any]:
        """Loss, for classification accuracy, and the experiment's own metrics."""
        job, splits, state = self._job, self._job.parts.splits, self._state
        if splits.test is None:
            return {}
        settings, ownership, test = job.experiment.evaluation, state.ownership, splits.test
        if job.is_tried:
            test = first_items(test, TRIED_BATCHES * settings.samples_per_batch)

        def forward(inputs: Tree, targets: Tree) -> tuple[Tree, Tree, Tensor]:
            with ownership.forward_alone():
                return self._strategy.passes.outputs_and_loss(model, inputs, targets)

        try:
            return evaluate(
                model,
                forward,
                job.parts.hits,
                test,
                settings,
                job.collectives,
                splits.collate,
                job.parts.metrics,
                keep_pace=not ownership.has_whole_weights,
                seed=EvaluationSeed(self._strategy.seeds, self._steps.last_epoch),
                written=WrittenParameters(model, "evaluation batch") if job.is_exact else None,
                weights=splits.test_weights,
            )
        except DependsOnLayout as error:
            place = job.collectives.world.place
            raise UserError(f"evaluation after step {state.step}, {place}: {error}") from None
        finally:
            ownership.forwards_done()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    forward: Callable[[Tree, Tree], tuple[Tree, Tree, Tensor]],
    count_hits: Loss | None,
    dataset: Dataset,
    settings: Evaluation,
    collectives: Collectives,
    collate: Collate | None = None,
    metrics: OwnMetrics | None = None,
    keep_pace: bool = False,
    seed: EvaluationSeed | None = None,
    written: WrittenParameters | None = None,
    weights: Weights | None = None,
) -> dict[str, Any]:
    """The mean loss, `test_loss`, and with `count_hits` the share of right answers, `test_accuracy`; on every rank.

    With `metrics` there are also its figures, `test_<name>`. `forward(inputs, targets)` gives outputs, targets on the
    outputs' device, and the loss summed over the batch. With `keep_pace` all ranks call `forward` equally often, so
    that it may be a collective. With `seed`, what is drawn for a batch follows from the epoch and the batch's number.
    `written` looks after the model's parameters: what `forward` leaves in them does not depend on the number of ranks.
    The loss is divided by what the samples weigh together, where `weights` says what each does.
    Raises DependsOnLayout where two batches leave other values in a parameter.
    """
    samples, size = len(dataset), settings.samples_per_batch
    batches = math.ceil(samples / size)
    world = collectives.world
    if settings.where == "rank0":
        mine, most = range(batches) if world.is_first else range(0), batches
    else:
        mine, most = range(world.rank, batches, world.world_size), math.ceil(batches / world.world_size)
    # The last batch is often the smallest. Where a rank runs it only to keep pace, it does not count.
    run = [*mine, *[batches - 1] * (most - len(mine) if keep_pace else 0)]
    device = collectives.device
    # The table stays on the device while batches are evaluated: reading a figure makes the host wait for the device.
    table = torch.zeros(batches, 2, dtype=torch.float64, device=device)
    own: OwnFigures | None = None
    if metrics is not None:
        from ddp_core.trainers.own_metrics import OwnFigures

        own = OwnFigures(metrics, device)
    training = model.training
    model.eval()
    loader = Loader(dataset, collate=collate, device=device)

    def passes(numbers: Sequence[int]) -> Generator[tuple[int, Tree, Tree, Tensor], None, None]:
        """The number, outputs, targets and loss of each of these batches."""
        wanted = (np.arange(batch * size, min((batch + 1) * size, samples), dtype=np.int64) for batch in numbers)
        keys = [() if seed is None else ([seed.key(batch)],) for batch in numbers]
        asked = ((0, [ids], *key) for ids, key in zip(wanted, keys, strict=True))
        with contextlib.closing(loader.stream(asked)) as stream:
            for batch, ((inputs, targets),) in zip(numbers, stream, strict=True):
                if seed is not None:
                    seed(batch)
                outputs, targets, loss = forward(inputs, targets)
                if written is not None:
                    written.refuse_changes(is_last=False)
                yield batch, outputs, targets, loss

    with contextlib.closing(passes(run)) as found:
        for number, (batch, outputs, targets, loss) in enumerate(found):
            if number >= len(mine):
                continue
            table[batch, 0] = loss.double()
            if count_hits is not None:
                with user_code("your hits"):
                    table[batch, 1] = count_hits(outputs, targets)
            if own is not None:
                own.add(batch, outputs, targets)
    is_written = torch.full((1, 2), float(written is not None and bool(written.written)), dtype=table.dtype)
    everyones = collectives.sum_(torch.cat([table.cpu(), is_written]))
    if everyones[batches].any() and not run:
        for _ in passes([batches - 1]):
            pass
    model.train(training)
    losses, hits = everyones[:batches].T.tolist()
    divisor = samples if weights is None else sum(map(int, weights[:samples])) or 1
    result: dict[str, Any] = {"test_loss": math.fsum(losses) / divisor}
    if count_hits is not None:
        result["test_accuracy"] = math.fsum(hits) / samples
    if own is None:
        return result
    if seed is not None:
        seed(batches)  # for what the metrics draw while they are computed
    return result | own.all(collectives)
