"""Which requests leave no place for a shard mode: refused with one line, before a process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.config.experiment import Component, DdpOptions, Experiment
from ddp_core.config.layout import ShardMode
from ddp_core.experiment.request import promise_broken_by
from ddp_core.sharding import Sharding
from tests.core.sharding.test_blocks import Number
from tests.support.wording import refusing


def experiment(**fields: Any) -> Experiment:
    parts = {"name": "mine", "model": Component(name="mlp"), "data": Component(name="digits")}
    return Experiment(**(parts | {"global_batch_size": 16, "micro_batch": 4} | fields))


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({"is_plain": True}, {}),
        ({}, {"reduction": "plain"}),
        ({}, {"micro_batch": None}),
        ({}, {"sync_batch_norm": True}),
        ({"cuda_graph": True}, {}),
        ({}, {"ddp": DdpOptions(static_graph=True)}),
        ({}, {"ddp": DdpOptions(communication_hook="fp16")}),
        ({"shard": "parameters"}, {"ema_decay": 0.9}),
        ({"shard": "parameters"}, {"memory_format": "channels_last"}),
    ],
)
def test_what_leaves_no_place_for_shards_is_named(asked: dict[str, Any], fields: dict[str, Any]) -> None:
    def check(shard: ShardMode, is_plain: bool = False, cuda_graph: bool = False) -> None:
        told = experiment(**fields)
        Sharding(shard).check(told, is_plain or told.reduction == "plain", promise_broken_by(told), cuda_graph)

    check(**{**asked, "shard": "gradients" if "shard" in asked else "none"})
    with refusing() as raised:
        check(**{"shard": "optimizer", **asked})
    assert "\n" not in str(raised.value)


def test_other_settings_of_ddp_stand_against_nothing() -> None:
    ddp = DdpOptions(bucket_cap_mb=1, gradient_as_bucket_view=True, find_unused_parameters=True)
    Sharding("gradients").check(experiment(ddp=ddp), False, None, False)


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
    shares = {"optimizer": "contiguous", "gradients": "strided"}
    kind = {} if mode == "parameters" else {"shares": shares[mode]}
    assert told == [(("module", "optimizer", 5), {"process_group": "group", "node": "here"} | kind)]
