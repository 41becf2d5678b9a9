"""Which requests leave no place for a shard mode: refused with one line, before a process starts."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core import sharding
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.config.experiment import Component, DdpOptions, Experiment
from ddp_core.config.layout import ShardMode
from ddp_core.experiment.request import promise_broken_by
from ddp_core.reduction.ordered_sum import OrderedSum
from ddp_core.sharding import OwnsPieces, Sharding
from ddp_core.sharding.contiguous import THREADS
from tests.support.thread_group import on_threads, use_threads

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


@pytest.mark.parametrize(("mode", "shares"), [("optimizer", [[0, 1], [2, 3, 4]]), ("gradients", [[0, 2, 4], [1, 3]])])
def test_what_a_rank_owns_comes_with_the_shares_of_its_mode(
    mode: ShardMode, shares: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    made = nn.Linear(50, 50)

    def cut(group: Any) -> list[int]:
        layer = copy.deepcopy(made)
        optimizer = torch.optim.SGD(layer.parameters())
        owned = Sharding(mode).cut(layer, optimizer, 5, group)
        assert isinstance(owned, OwnsPieces)
        assert optimizer.param_groups[0]["params"] == [each.tensor for each in owned.owned if each.tensor is not None]
        assert owned.module is layer
        owned.close()
        owned.reduction.close()
        return list(owned.reduction.share)

    assert on_threads(2, cut) == shares


@pytest.mark.parametrize("shares", ["contiguous", "strided"])
def test_pieces_lie_and_wait_as_they_were_told(shares: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    made = nn.Linear(3000, 3)

    def pieces(nodes: tuple[int, ...], group: Any) -> Any:
        layer = copy.deepcopy(made)
        optimizer = torch.optim.SGD(layer.parameters())
        owned = OwnsPieces(
            *(layer, optimizer, 6),
            process_group=group,
            timeout=timedelta(seconds=9),
            shares=shares,
            node=nodes[group.rank()],
        )
        channel: Any = owned._channel
        owned.reduction.close()
        told = (channel.ordered_sum.groups, channel.threads, type(owned._parts).__name__)
        return channel.group.asked, told, [(each.start, each.stop) for each in owned.owned]  # type: ignore[union-attr]

    asked = (torch.device("cpu"), timedelta(seconds=9))
    one = ((), 1 if shares == "strided" else THREADS, "PartsInOneLevel")
    several = (((0, 1), (2, 3)), OrderedSum.PHASES, "PartsInTwoLevels")
    # Of the weight, and of the bias.
    thirds = [[(0, 3072), (0, 0)], [(3072, 6144), (0, 0)], [(6144, 9000), (0, 3)]]
    assert on_threads(3, partial(pieces, (7, 7, 7))) == [(asked, one, third) for third in thirds]
    # The first ranks of both nodes lie side by side.
    quarters = [[(0, 2048), (0, 0)], [(4096, 7168), (0, 0)], [(2048, 4096), (0, 0)], [(7168, 9000), (0, 3)]]
    assert on_threads(4, partial(pieces, (7, 7, 8, 8))) == [(asked, several, quarter) for quarter in quarters]


@pytest.mark.parametrize("mode", ["optimizer", "gradients", "parameters"])
def test_a_sharding_passes_on_what_it_is_told(mode: ShardMode, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    for name in ("pieces.OwnsPieces", "rows.OwnsRows"):
        monkeypatch.setattr(f"ddp_core.sharding.{name}", lambda *given, **named: told.append((given, named)))
    Sharding(mode).cut("module", "optimizer", 5, "group", node="here")  # type: ignore[arg-type]
    kind = {} if mode == "parameters" else {"shares": _SHARES[mode]}
    assert told == [(("module", "optimizer", 5), {"process_group": "group", "node": "here"} | kind)]


def test_each_name_is_there_when_it_is_asked_for() -> None:
    for name in sharding.__all__:
        assert getattr(sharding, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'OwnsNothing'"):
        _ = sharding.OwnsNothing


@pytest.mark.parametrize("mode", ["optimizer", "gradients"])
def test_other_weights_on_a_rank_are_refused_before_the_first_step(
    mode: ShardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    made = nn.Linear(3, 2)

    def begin(group: Any) -> None:
        layer = copy.deepcopy(made)
        owned = Sharding(mode).cut(layer, torch.optim.SGD(layer.parameters()), 4, group)
        with torch.no_grad():
            layer.bias.add_(group.rank())  # as a checkpoint that one rank has not loaded
        with pytest.raises(ValueError, match="bias is another on rank 1 than on rank 0"):
            owned.reduction.begin(4)
        owned.reduction.close()

    on_threads(2, begin)
