"""Evaluation that counts every held-out sample once and gives the same numbers on every layout.

The batches are the same on every layout, and the ranks take them in turn. Each rank fills in its own entries of a table
of zeros, so the sum over ranks is exact, and `math.fsum` rounds once. (DistributedSampler would pad the samples and
count some of them twice.)

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

from ddp_core.base.seeds import EvaluationSeed
from ddp_core.base.trees import Collate, Tree
from ddp_core.base.user_code import user_code
from ddp_core.config.experiment import Evaluation
from ddp_core.data.loader import Loader
from ddp_core.data.splits import Dataset, Weights
from ddp_core.distributed.process_group import Collectives
from ddp_core.model.losses import Loss
from ddp_core.reduction.watching import WrittenParameters

if TYPE_CHECKING:
    from ddp_core.trainers.own_metrics import OwnFigures, OwnMetrics


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

        own = OwnFigures(metrics, batches, device)
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
