"""What a process that owns all has of weights, gradients and optimizer state, and what it has in common with others."""

from __future__ import annotations

import torch
from torch import nn

from ddp_core.sharding.ownership import OwnsAll


def trained() -> OwnsAll:
    """Of a model with a frozen parameter and one without a gradient, after an update."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    module[2].bias.requires_grad_(False)
    module.spare = nn.Parameter(torch.ones(2))  # type: ignore[assignment]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for part in module:
        part.train()
    module[2](module[1](module[0](torch.randn(4, 2)))).square().sum().backward()
    optimizer.step()
    return OwnsAll(module, optimizer)


def test_what_all_ranks_have_is_told_by_names_in_one_sequence() -> None:
    owns = trained()
    told = list(owns.replicated())
    weights = dict(owns.module.named_parameters())
    momenta = [name for name in weights if name not in ("2.bias", "spare")]
    assert [name for name, _ in told] == [
        *(f"parameter {name}" for name in weights),
        *(f"buffer {name}" for name, _ in owns.module.named_buffers()),
        *(f"the optimizer's momentum_buffer of {name}" for name in momenta),
    ]
    values = dict(told)
    assert all(torch.equal(values[f"parameter {name}"], each) for name, each in weights.items())
    for name in momenta:
        momentum = owns.optimizer.state[weights[name]]["momentum_buffer"]
        assert values[f"the optimizer's momentum_buffer of {name}"] is momentum
    owns.has_whole_weights = False
    assert [name for name, _ in owns.replicated() if "optimizer" not in name] == [
        f"buffer {name}" for name, _ in owns.module.named_buffers()
    ]
