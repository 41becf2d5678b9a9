"""Do metrics of torchmetrics, and one that is derived from them, give the same figures on every layout?"""

import torch
from torch import Tensor, nn

from ddp_core import Experiment, InMemory, Splits
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.config.experiment import Evaluation

import_torchvision()  # torchmetrics imports it, and it may have been built against another torch

from torchmetrics import MeanMetric  # noqa: E402
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score  # noqa: E402
from torchmetrics.wrappers import BootStrapper  # noqa: E402


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def data() -> Splits:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(70, 6, generator=generator)
    targets = torch.randint(0, 3, (70,), generator=generator)
    return Splits(InMemory(inputs[:48], targets[:48]), InMemory(inputs[48:], targets[48:]))


class Sureness(MeanMetric):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs.softmax(1).amax(1))


metrics = {
    "auroc": MulticlassAUROC(3),
    "f1": MulticlassF1Score(3, average="macro"),
    "per_class": MulticlassF1Score(3, average="none"),
    "sureness": Sureness(),
    "drawn": BootStrapper(MulticlassF1Score(3), num_bootstraps=3),
    "largest": lambda outputs, targets: (outputs.amax(1).sum(), len(outputs)),
}

# With five samples at a time, the 22 held-out samples are five batches: two ranks have 3 and 2, three have 2, 2 and 1.
experiment = Experiment(
    name="other_peoples_metrics",
    global_batch_size=12,
    micro_batch=2,
    epochs=2,
    ema_decay=0.9,
    evaluation=Evaluation(samples_per_batch=5),
)
