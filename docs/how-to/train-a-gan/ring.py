"""Does a generator learn to draw points on a ring, against a critic whose slope is held near 1?"""

import math

import torch
from torch import nn
from torch.nn.functional import softplus

from ddp_core import Component, Experiment, InMemory, Splits


class Gan(nn.Module):
    def __init__(self, width, noise):
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(nn.Linear(noise, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, real):
        drawn = self.generator(torch.randn(len(real), self.noise, device=real.device))
        # The generator's loss goes through the critic, and leaves no gradient in it.
        frozen = {name: parameter.detach() for name, parameter in self.critic.named_parameters()}
        judged = torch.func.functional_call(self.critic, frozen, drawn)
        fake = drawn.detach()
        slope = self.slope(real, fake)
        return {"drawn": fake, "real": self.critic(real), "fake": self.critic(fake), "judged": judged, "slope": slope}

    def slope(self, real, fake):
        share = torch.rand(len(real), 1, device=real.device)
        with torch.enable_grad():  # also in an evaluation
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return slope.norm(dim=1)


class InTurn(torch.optim.Adam):
    """Updates one parameter group in each step: the critic's, the generator's, the critic's, ..."""

    def step(self, closure=None):
        turn = self.param_groups[0].setdefault("turn", 0)  # in a group, it is in the checkpoint
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"] if number != turn else ():
                parameter.grad = None
        super().step(closure)
        self.param_groups[0]["turn"] = (turn + 1) % len(self.param_groups)


def data(size: int = 2048):
    angle = 2 * math.pi * torch.rand(size, generator=torch.Generator().manual_seed(0))
    points, nothing = torch.stack([angle.cos(), angle.sin()], dim=1), torch.zeros(size)
    return Splits(InMemory(points[256:], nothing[256:]), InMemory(points[:256], nothing[:256]))


def model(width: int = 32, noise: int = 4):
    return Gan(width, noise)


def optimizer(model, lr: float = 0.002, critic_lr: float = 0.004):
    critic = {"params": list(model.critic.parameters()), "lr": critic_lr}
    return InTurn([critic, {"params": list(model.generator.parameters())}], lr=lr, betas=(0.5, 0.9))


def loss(outputs, targets, penalty: float = 1.0):
    critic = softplus(-outputs["real"]).sum() + softplus(outputs["fake"]).sum()
    critic = critic + penalty * (outputs["slope"] - 1).square().sum()
    return critic + softplus(-outputs["judged"]).sum()


def metrics(outputs, targets):
    return {"off_the_ring": ((outputs["drawn"].norm(dim=1) - 1).abs().sum(), len(targets))}


experiment = Experiment(
    name="ring", optimizer=Component(name="optimizer"), global_batch_size=64, micro_batch=8, epochs=20
)
