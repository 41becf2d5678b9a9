"""Which implementation of an optimizer a model gets, and that no layout in memory mixes up the elements of a tensor."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
import torch
from torch import nn

from ddp_core.base.digests import weights_digest
from ddp_core.config.experiment import Optimizer
from ddp_core.model.builders import laid_out, lay_out
from ddp_core.model.optimizers import build_optimizer, implementation, same_layout

KINDS: list[dict[str, Any]] = [
    {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"name": "adam"},
    {"name": "adamw", "weight_decay": 0.1},
]
Form = Literal["contiguous", "channels last", "transposed"]


def model_in(form: Form) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    if form == "channels last":
        model.to(memory_format=torch.channels_last)
    if form == "transposed":
        weight = model[2].weight.detach()
        model[2].weight = nn.Parameter(weight.t().contiguous().t())
    return model


def trained(form: Form, settings: Optimizer, restarted: bool = False) -> list[torch.Tensor]:
    model = model_in(form)
    optimizer = build_optimizer(settings, model)
    for step in range(3):
        if restarted and step == 2:
            state = optimizer.state_dict()
            for tensors in state["state"].values():
                tensors.update({name: value.contiguous() for name, value in tensors.items() if value is not None})
            optimizer = build_optimizer(settings, model)
            optimizer.load_state_dict(state)
        gradients = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            # Contiguous whatever the parameter's strides are: what a model sets by itself may be.
            parameter.grad = torch.randn(parameter.shape, generator=gradients)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["name"])
def test_every_implementation_trains_alike(kind: dict[str, Any], form: Form) -> None:
    expected = trained("contiguous", Optimizer(**kind, implementation="loop"))
    for chosen in ("fused", "foreach", "loop"):
        found = trained(form, Optimizer(**kind, implementation=chosen))
        for mine, other in zip(found, expected, strict=True):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_fused_is_the_default_where_its_kernels_are_safe() -> None:
    def chosen(form: Form, **fields: Any) -> str:
        return implementation(Optimizer(**fields), list(model_in(form).parameters()))

    assert chosen("contiguous") == chosen("channels last") == chosen("transposed") == "fused"
    assert chosen("contiguous", implementation="foreach") == "loop"
    unsafe = {"complex": torch.zeros(2, dtype=torch.complex64), "gaps": torch.zeros(4, 4)[:, :2]}
    unsafe["overlaps"] = torch.zeros(3).expand(4, 3)
    assert {name: implementation(Optimizer(), [tensor]) for name, tensor in unsafe.items()} == dict.fromkeys(
        unsafe, "loop"
    )


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["name"])
def test_states_that_a_checkpoint_laid_out_otherwise_are_not_mixed_up(kind: dict[str, Any], form: Form) -> None:
    """Checkpoints hold values, not strides; the CPU's fused kernels walk parameters and states by address."""
    expected = trained(form, Optimizer(**kind))
    assert all(map(torch.equal, trained(form, Optimizer(**kind), restarted=True), expected))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["name"])
def test_the_bits_do_not_depend_on_the_threads(kind: dict[str, Any]) -> None:
    def after(threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            parameter = nn.Parameter(torch.randn(1_000_003, generator=torch.Generator().manual_seed(1)))
            model = nn.ParameterList([parameter])
            optimizer = build_optimizer(Optimizer(**kind), model)
            for step in range(2):
                parameter.grad = torch.randn(1_000_003, generator=torch.Generator().manual_seed(step))
                optimizer.step()
            return parameter.detach()
        finally:
            torch.set_num_threads(before)

    assert torch.equal(after(1), after(3))


IMAGES, FILM = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 6)


def test_a_model_keeps_its_parameters_and_its_digest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(2, 2, 3), nn.Linear(4, 2))
    before, digest = list(model.parameters()), weights_digest(model.state_dict())
    assert lay_out(model, "channels_last") is model
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), before, strict=True))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not model[0].weight.is_contiguous()
    assert weights_digest(model.state_dict()) == digest


@pytest.mark.parametrize("tensor", [IMAGES, FILM])
def test_what_has_channels_is_laid_out(tensor: torch.Tensor) -> None:
    found = laid_out(tensor, "channels_last")
    assert torch.equal(found, tensor)
    assert found.stride()[1] == 1
    assert laid_out(tensor, "contiguous") is tensor
    assert laid_out(found, "channels_last") is found
    no_channels = torch.arange(6).reshape(1, 2, 3)
    assert laid_out(no_channels, "channels_last") is no_channels


def test_strides_of_a_single_element_mean_nothing() -> None:
    filters = torch.randn(4, 1, 3, 3)
    last = filters.contiguous(memory_format=torch.channels_last)
    assert same_layout(filters, last.as_strided(filters.shape, (9, 1, 3, 1)))
    assert not same_layout(IMAGES, laid_out(IMAGES, "channels_last"))
