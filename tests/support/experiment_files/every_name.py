"""Does a file that uses every name end with the same bits on every layout?

BatchNorm, Dropout, two parameter groups, a schedule in two parts, averaged weights, whole and floating-point metrics.
Each global batch of 12 is cut into six micro-batches of 2, which two and three ranks share evenly.
"""

import torch
from torch import Tensor, nn

from ddp_core.config.experiment import Evaluation, Experiment
from ddp_core.data.splits import InMemory, Splits, content_digest
from ddp_core.observe.callback import Callback, Moment
from ddp_core.observe.step import StepBatch, StepObserver


def model(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


def data(size: int = 96, held_out: int = 22) -> Splits:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size + held_out, 6, generator=generator)
    targets = torch.randint(0, 3, (size + held_out,), generator=generator)
    train, test = InMemory(inputs[:size], targets[:size]), InMemory(inputs[size:], targets[size:])
    return Splits(train, test, 3, digest=content_digest(inputs, targets))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).sum()


def optimizer(model: nn.Module, lr: float = 0.02, ratio: float = 0.5) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.NAdam([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": lr * ratio}], lr=lr)


def schedule(
    optimizer: torch.optim.Optimizer, total_steps: int, warm_up: int = 3
) -> torch.optim.lr_scheduler.LRScheduler:
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=warm_up)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [warm_up])


def top2(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs.topk(2).indices == targets[:, None]).any(1).sum(), len(targets)


def confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = torch.zeros(3, 3, dtype=torch.int64)
    return counts.index_put_((targets, outputs.argmax(1)), torch.ones_like(targets), accumulate=True)


def mean_class(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return outputs.softmax(1).sum(0), len(targets)


class Perplexity:
    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, object]:
        return {"loss": nn.functional.cross_entropy(outputs, targets, reduction="sum"), "samples": len(targets)}

    def finish(self, sums: dict[str, Tensor]) -> Tensor:
        return (sums["loss"] / sums["samples"]).exp()


class PerClass:
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return confusion(outputs, targets)

    def finish(self, counts: Tensor) -> dict[str, Tensor]:
        f1 = 2 * counts.diag() / (counts.sum(0) + counts.sum(1))
        return {"f1": f1, "mean_f1": f1.nanmean()}


metrics = {
    "top2": top2,
    "confusion": confusion,
    "mean_class": mean_class,
    "perplexity": Perplexity(),
    "class": PerClass(),
}


class Lines(Callback):
    """Writes a line at each epoch's end, and at the end."""

    def on_epoch(self, moment: Moment) -> None:
        with (moment.directory / "lines.txt").open("a") as file:
            file.write(f"{moment.epoch} {moment.step} {moment.loss} {moment.evaluation['test_top2']}\n")

    def on_end(self, moment: Moment) -> None:
        with (moment.directory / "lines.txt").open("a") as file:
            file.write(f"end {moment.step} {len(list((moment.directory / 'checkpoints').glob('*.pt')))}\n")


class OnEveryRank(Callback):
    """Counts steps on every rank."""

    ranks = "all"

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, moment: Moment) -> None:
        self.steps += 1

    def on_end(self, moment: Moment) -> None:
        (moment.directory / f"steps-{moment.rank}.txt").write_text(str(self.steps))


class Samples(StepObserver):
    """Sees which samples a rank trains."""

    def before_step(self, batch: StepBatch) -> None:
        assert sum(len(ids) for ids in batch.ids) <= batch.samples


def callbacks() -> list[object]:
    return [Lines(), OnEveryRank(), Samples()]


# With five samples at a time, the 22 held-out samples are five batches: two ranks have 3 and 2, three have 2, 2 and 1.
experiment = Experiment(
    name="every_name",
    global_batch_size=12,
    micro_batch=2,
    epochs=2,
    ema_decay=0.9,
    evaluation=Evaluation(samples_per_batch=5),
)
