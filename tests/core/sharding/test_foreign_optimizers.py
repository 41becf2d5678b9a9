"""The optimizers of the package pytorch_optimizer: none that may be sharded trains otherwise in pieces than whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.sharding.elementwise import require_elementwise
from ddp_core.sharding.owned import Owned, Rows
from tests.foreign.experiments.updates import made, transformer

pytestmark = [pytest.mark.slow, pytest.mark.extras("pytorch_optimizer")]

_STEPS = 5
_RANKS = 2


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return transformer()


def train(
    update: Callable[[list[Tensor], list[Tensor]], None], model: nn.Module, parameters: list[nn.Parameter]
) -> list[Tensor]:
    """Five steps; `update` changes the weights that it is given by their gradients."""
    weights = [each.detach() for each in parameters]
    for step in range(_STEPS):
        inputs = torch.randint(0, 100, (4, 12), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
        update(weights, list(torch.autograd.grad(loss, parameters)))
    return [each.clone() for each in weights]


def as_a_whole(name: str) -> list[Tensor]:
    model = seeded()
    parameters = list(model.parameters())
    optimizer = made(name, parameters)

    def update(weights: list[Tensor], gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return train(update, model, parameters)


def on_ranks(name: str, cut: Callable[[int, nn.Parameter, int], Owned]) -> list[Tensor]:
    model = seeded()
    parameters = list(model.parameters())
    owned = [[cut(place, each, rank) for place, each in enumerate(parameters)] for rank in range(_RANKS)]
    tensors = [[part.tensor for part in parts if part.tensor is not None] for parts in owned]
    optimizers = [made(name, mine) for mine in tensors]

    def update(weights: list[Tensor], gradients: list[Tensor]) -> None:
        for parts, optimizer in zip(owned, optimizers, strict=True):
            for part, gradient in zip(parts, gradients, strict=True):
                if part.tensor is not None:
                    part.tensor.grad = part.filled(part.of_whole(gradient)).clone()
            optimizer.step()
            for part, whole in zip(parts, weights, strict=True):
                if part.tensor is not None:
                    whole.view(-1)[part.start : part.stop] = part.tensor.detach()[part.inside]

    return train(update, model, parameters)


def piece(place: int, whole: nn.Parameter, rank: int) -> Owned:
    """Of a parameter of several blocks each rank has one half, of a small one a rank has all."""
    cut = min(1024 * (1 + whole.numel() // 2048), whole.numel())
    start, stop = ((0, cut), (cut, whole.numel()))[(place + rank) % 2]
    tensor = nn.Parameter(whole.detach().view(-1)[start:stop].clone()) if start < stop else None
    return Owned("", whole, start, stop, tensor)


def rows(place: int, whole: nn.Parameter, rank: int) -> Owned:
    return Rows("", whole, whole.detach().chunk(_RANKS)[rank].clone().view(-1), rank, _RANKS)


def test_what_passes_the_trial_has_the_same_bits_in_pieces() -> None:
    import pytorch_optimizer

    accepted, refused, unmade = [], [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in pytorch_optimizer.get_supported_optimizers():
            try:
                optimizer = made(name, seeded().parameters())
            except Exception:
                unmade.append(name)  # needs the model, several groups, another package
                continue
            try:
                require_elementwise(optimizer)
            except UserError:
                refused.append(name)
                continue
            accepted.append(name)
            whole = as_a_whole(name)
            for cut in (piece, rows):
                parts = on_ranks(name, cut)
                assert all(map(torch.equal, whole, parts)), f"{name} passes, and differs in {cut.__name__}"
    print(f"{len(accepted)} are accepted, {len(refused)} refused, {len(unmade)} need something else")
    assert {"adan", "lion", "adabelief", "schedulefreeadamw", "ademamix"} <= set(accepted)
    assert {"lamb", "lars", "novograd", "soap", "adafactor", "prodigy", "gravity", "kron"} <= set(refused)
