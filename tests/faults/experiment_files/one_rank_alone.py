"""Is it seen when a function of the user's changes the state of one rank alone?"""

import os

import torch

from ddp_core import Callback, Component, Experiment
from ddp_core.observe.callback import Moment

CHANGED, STEP = os.environ.get("CHANGED", ""), int(os.environ.get("STEP", "3"))


class Changes(Callback):
    """Changes what CHANGED names, on rank 0 alone."""

    @torch.no_grad()
    def on_step(self, moment: Moment) -> None:
        if moment.step == STEP and CHANGED:
            for named in (moment.model.named_parameters(), moment.model.named_buffers()):
                for name, tensor in named:
                    if name == CHANGED:
                        tensor.add_(1)


class Forgets(torch.optim.SGD):
    """Changes its momentum on rank 0 alone."""

    elementwise = True

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        group = self.param_groups[0]
        group["updates"] = group.get("updates", 0) + 1
        if group["updates"] == STEP and CHANGED == "momentum" and os.environ["RANK"] == "0":
            next(iter(self.state.values()))["momentum_buffer"].zero_()


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Forgets(model.parameters(), lr=0.1, momentum=0.9)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


callbacks = [Changes()]
experiment = Experiment(
    name="one_rank_alone",
    data=Component(name="toy_data", options={"size": 64}),
    loss="mean_squared_error",
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
)
