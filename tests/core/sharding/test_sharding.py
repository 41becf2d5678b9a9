"""Which requests leave no place for a shard mode: refused with one line, before a process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.config.experiment import Component, DdpOptions, Experiment
from ddp_core.config.layout import ShardMode
from ddp_core.experiment.request import promise_broken_by
from ddp_core.sharding import Sharding

_SHARES = {"optimizer": "contiguous", "gradients": "strided"}


def experiment(**fields: Any) -> Experiment:
    parts = {"name": "mine", "model": Component(name="mlp"), "data": Component(name="digits")}
    return Experiment(**(parts | {"global_batch_size": 16, "micro_batch": 4} | fields))


def check(told: Experiment, shard: ShardMode, is_plain: bool = False, cuda_graph: bool = False) -> None:
    is_plain = is_plain or told.reduction == "plain"
    Sharding(shard).check(told, is_plain, promise_broken_by(told), cuda_graph)


@pytest.mark.parametrize(
    ("asked", "fields", "words"),
    [
        ({"is_plain": True}, {}, ["--shard optimizer needs the exact reduction", "use --reduction exact"]),
        ({}, {"reduction": "plain"}, ["--shard optimizer needs the exact reduction", "leave --shard out"]),
        ({}, {"micro_batch": None}, ["cannot be had here: without micro_batch", "leave --shard out"]),
        ({}, {"sync_batch_norm": True}, ["sync_batch_norm is for the plain sums", "leave --shard out"]),
        ({"cuda_graph": True}, {}, ["--cuda-graph", "leave one of them out"]),
        ({}, {"ddp": DdpOptions(static_graph=True)}, ["ddp.static_graph would change nothing"]),
        ({}, {"ddp": DdpOptions(communication_hook="fp16")}, ["ddp.communication_hook would change nothing"]),
    ],
)
def test_what_leaves_no_place_for_shards_is_named(
    asked: dict[str, Any], fields: dict[str, Any], words: list[str]
) -> None:
    told = experiment(**fields)
    check(told, "none", **asked)
    with pytest.raises(UserError) as raised:
        check(told, "optimizer", **asked)
    assert raised.value.exit_code == ExitCode.BAD_INPUT
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "value"), [("ema_decay", 0.9), ("memory_format", "channels_last")])
def test_what_needs_whole_parameters_is_named(name: str, value: Any) -> None:
    told = experiment(**{name: value})
    check(told, "gradients")
    with pytest.raises(UserError, match=f"{name}.*; use --shard gradients, or leave it out"):
        check(told, "parameters")


def test_other_settings_of_ddp_stand_against_nothing() -> None:
    ddp = DdpOptions(bucket_cap_mb=1, gradient_as_bucket_view=True, find_unused_parameters=True)
    assert Sharding("gradients").refused_by(experiment(ddp=ddp)) is None
    check(experiment(ddp=ddp), "gradients")


class Number(nn.Module):
    """Its only parameter has no dimension, so that it has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("mode", ["none", "optimizer", "gradients", "parameters"])
def test_parts_that_cannot_be_cut_are_refused_where_something_is(mode: ShardMode) -> None:
    layer, number = nn.Linear(2, 2), Number()
    Sharding(mode).check_parts(layer, torch.optim.SGD(layer.parameters()))
    attempts = {
        "LBFGS does not treat each element by itself": (layer, torch.optim.LBFGS(layer.parameters())),
        "number is a single number": (number, torch.optim.SGD(number.parameters())),
    }
    refused = {"none": [False, False], "parameters": [True, True]}.get(mode, [True, False])
    for (words, attempt), is_refused in zip(attempts.items(), refused, strict=True):
        if is_refused:
            with pytest.raises(UserError, match=words):
                Sharding(mode).check_parts(*attempt)
        else:
            Sharding(mode).check_parts(*attempt)


@pytest.mark.parametrize("mode", ["optimizer", "gradients", "parameters"])
def test_a_sharding_passes_on_what_it_is_told(mode: ShardMode, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    for name in ("pieces.OwnsPieces", "rows.OwnsRows"):
        monkeypatch.setattr(f"ddp_core.sharding.{name}", lambda *given, **named: told.append((given, named)))
    Sharding(mode).cut("module", "optimizer", 5, "group", node="here")  # type: ignore[arg-type]
    kind = {} if mode == "parameters" else {"shares": _SHARES[mode]}
    assert told == [(("module", "optimizer", 5), {"process_group": "group", "node": "here"} | kind)]
