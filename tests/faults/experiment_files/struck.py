"""Does a small network end with the same weights when a rank is killed in the middle of a step?

STRUCK_KILLS in the environment names processes and where in their work they are killed (SIGKILL): with "1.0 update 20"
it is the process 1.0 on node 0 of a live recovery, when it begins its 20th update; "1.0@1" is one on node 1. A process
that takes its place has another name, and lives. With STRUCK_HANGS it is not killed, but hangs.
STRUCK_PAUSE is how long each update takes, in seconds. BatchNorm, an average, momenta and a schedule are what a step
may leave half changed.
"""

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_core import Callback, Moment
from ddp_core.config.experiment import Component, Evaluation, Experiment, Optimizer, Schedule
from ddp_core.data.splits import InMemory, Splits, content_digest
from ddp_core.trainers.step_losses import StepLosses

POINTS = ("forward", "backward", "exchange", "update", "updated", "evaluation", "save", "later")
HAS_SENT = [False]
"""Whether this process has sent all that it sends beside gradients, but not run the step's last backward."""
MOST = [1]
"""How many ranks there have been at most."""
LEFT = dict.fromkeys(POINTS, -1)
"""How many times this process may still come to each point; below 0: always."""


def pass_by(point: str) -> None:
    LEFT[point] -= 1
    if LEFT[point] == 0 and point == "later":
        # Meanwhile it goes on: it waits for others, or is in its update.
        threading.Timer(0.0017, die).start()
    elif LEFT[point] == 0:
        # Where only gradients are missing, all else has arrived by then.
        time.sleep(1.0 if point == "exchange" else 0.0)
        die()


def die() -> None:
    while os.environ.get("STRUCK_HANGS"):
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


class Struck(nn.Module):
    """The identity; each forward and backward passes by."""

    def forward(self, inputs: Tensor) -> Tensor:
        pass_by("forward" if self.training else "evaluation")
        if self.training:
            pass_by("later")
        if inputs.requires_grad:
            inputs.register_hook(pass_backward)
        return inputs


def pass_backward(_: Tensor) -> None:
    pass_by("backward")
    if HAS_SENT[0]:
        HAS_SENT[0] = False
        pass_by("exchange")


def network() -> nn.Module:
    LEFT.update(dict.fromkeys(POINTS, -1))
    member = os.environ.get("DDP_MEMBER", "")
    for each in filter(None, os.environ.get("STRUCK_KILLS", "").split(",")):
        name, point, count = each.split()
        if name in (member, member.removesuffix("@0")) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            LEFT[point] = int(count)
    hidden = [nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*hidden, Struck(), nn.Linear(12, 3))


def wait_for_successor() -> None:
    """Let a process join that shall be killed, too, before the steps are done: the others train slowly without it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    MOST[0] = max(MOST[0], ranks)
    kills = os.environ.get("STRUCK_KILLS", "")
    if ranks < MOST[0] and any(".0" not in each.split()[0] for each in kills.split(",") if each):
        time.sleep(1)


def save(*arguments: Any, **named: Any) -> None:
    usual_save(*arguments, **named)
    pass_by("save")


def send(*arguments: Any, **named: Any) -> None:
    usual_send(*arguments, **named)
    HAS_SENT[0] = True


usual_save, torch.save = torch.save, save
usual_send, StepLosses.send = StepLosses.send, send  # type: ignore[method-assign]
register_optimizer_step_pre_hook(lambda *_: time.sleep(float(os.environ.get("STRUCK_PAUSE", "0"))))
register_optimizer_step_pre_hook(lambda *_: wait_for_successor())
register_optimizer_step_pre_hook(lambda *_: pass_by("update"))
register_optimizer_step_post_hook(lambda *_: pass_by("updated"))


def dots() -> Splits:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(116, 6, generator=generator), torch.randint(0, 3, (116,), generator=generator)
    train, test = InMemory(inputs[:96], targets[:96]), InMemory(inputs[96:], targets[96:])
    return Splits(train, test, 3, None, content_digest(inputs, targets))


class Counts(Callback):
    """Counts what it is told, keeps the counts, and writes a line about each."""

    def __init__(self) -> None:
        self.counts, self.loss = {"step": 0, "epoch": 0, "end": 0}, 0.0

    def note(self, what: str, moment: Moment) -> None:
        self.counts[what] += 1
        self.loss += moment.loss or 0.0
        with (moment.directory / "told.txt").open("a") as file:
            file.write(f"{what} {moment.step} {self.counts[what]}\n")

    def on_step(self, moment: Moment) -> None:
        self.note("step", moment)

    def on_epoch(self, moment: Moment) -> None:
        self.note("epoch", moment)

    def on_end(self, moment: Moment) -> None:
        self.note("end", moment)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.loss = dict(state["counts"]), state["loss"]


def callbacks() -> list[Callback]:
    return [Counts()]


experiment = Experiment(
    name="struck",
    model=Component(name="network"),
    data=Component(name="dots"),
    loss="cross_entropy",
    optimizer=Optimizer(name="adamw", lr=0.01),
    schedule=Schedule(name="cosine"),
    clip_norm=1.0,
    ema_decay=0.9,
    evaluation=Evaluation(samples_per_batch=2),
    global_batch_size=12,
    micro_batch=2,
    epochs=6,
    reduction="exact",
)
