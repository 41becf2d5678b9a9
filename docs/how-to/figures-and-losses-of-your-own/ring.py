"""Does a generator learn to draw points on a ring, against a critic whose slope is held near 1?"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ddp_core import Component, Experiment, InMemory, Splits


class Gan(nn.Module):
    def __init__(self, width: int, noise: int) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(nn.Linear(noise, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, real: Tensor) -> dict[str, Tensor]:
        drawn = self.generator(torch.randn(len(real), self.noise, device=real.device))
        # The generator's loss goes through the critic, and leaves no gradient in it.
        frozen = {name: parameter.detach() for name, parameter in self.critic.named_parameters()}
        judged = torch.func.functional_call(self.critic, frozen, drawn)
        fake = drawn.detach()
        slope = self.slope(real, fake)
        return {"drawn": fake, "real": self.critic(real), "fake": self.critic(fake), "judged": judged, "slope": slope}

    def slope(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1, device=real.device)
        with torch.enable_grad():  # also in an evaluation
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        length: Tensor = slope.norm(dim=1)
        return length


class InTurn(torch.optim.Adam):
    """Updates one parameter group in each step: the critic's, the generator's, the critic's, ..."""

    elementwise = True  # for --shard: the update of a number needs no other one

    def step(self, closure: Any = None) -> Any:
        turn = self.param_groups[0].setdefault("turn", 0)  # in a group, it is in the checkpoint
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"] if number != turn else ():
                parameter.grad = None
        loss = super().step(closure)
        self.param_groups[0]["turn"] = (turn + 1) % len(self.param_groups)
        return loss


def data(size: int = 2048) -> Splits:
    angle = 2 * math.pi * torch.rand(size, generator=torch.Generator().manual_seed(0))
    points, nothing = torch.stack([angle.cos(), angle.sin()], dim=1), torch.zeros(size)
    return Splits(InMemory(points[256:], nothing[256:]), InMemory(points[:256], nothing[:256]))


def model(width: int = 32, noise: int = 4) -> Gan:
    return Gan(width, noise)


def optimizer(model: Gan, lr: float = 0.002, critic_lr: float = 0.004) -> InTurn:
    critic: dict[str, Any] = {"params": list(model.critic.parameters()), "lr": critic_lr}
    return InTurn([critic, {"params": list(model.generator.parameters())}], lr=lr, betas=(0.5, 0.9))


def loss(outputs: dict[str, Tensor], targets: Tensor, penalty: float = 1.0) -> Tensor:
    critic = softplus(-outputs["real"]).sum() + softplus(outputs["fake"]).sum()
    critic = critic + penalty * (outputs["slope"] - 1).square().sum()
    return critic + softplus(-outputs["judged"]).sum()


def metrics(outputs: dict[str, Tensor], targets: Tensor) -> dict[str, tuple[Tensor, int]]:
    return {"off_the_ring": ((outputs["drawn"].norm(dim=1) - 1).abs().sum(), len(targets))}


experiment = Experiment(
    name="ring", optimizer=Component(name="optimizer"), global_batch_size=64, micro_batch=8, epochs=20
)
