"""Which requests leave no place for a shard mode: refused with one line, before a process starts."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli.shard_modes import check_shards, shards_refused_by
from ddp_core.config.experiment import Component, DdpOptions, Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked
from ddp_core.config.records import ReductionKind


def experiment(**fields: Any) -> Experiment:
    parts = {"name": "mine", "model": Component(name="mlp"), "data": Component(name="digits")}
    return Experiment(**(parts | {"global_batch_size": 16, "micro_batch": 4} | fields))


@pytest.mark.parametrize(
    ("asked", "fields", "words"),
    [
        ({"reduction": "plain"}, {}, ["--shard optimizer needs the exact reduction", "use --reduction exact"]),
        ({}, {"reduction": "plain"}, ["--shard optimizer needs the exact reduction", "--shard parameters"]),
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
    request, told = Asked.model_validate({"experiment": "mine"} | asked), experiment(**fields)
    check_shards(request, told, Layout(kind="ddp", nproc_per_node=2))
    with pytest.raises(UserError) as raised:
        check_shards(request, told, Layout(kind="ddp", nproc_per_node=2, shard="optimizer"))
    assert raised.value.exit_code == ExitCode.BAD_INPUT
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fields", [{}, {"reduction": "plain"}, {"micro_batch": None}], ids=["exact", "plain", "uncut"])
@pytest.mark.parametrize("reduction", [None, "plain"])
def test_parameters_can_be_sharded_with_either_reduction(
    fields: dict[str, Any], reduction: ReductionKind | None
) -> None:
    request = Asked(experiment="mine", reduction=reduction)
    check_shards(request, experiment(**fields), Layout(kind="ddp", nproc_per_node=2, shard="parameters"))


@pytest.mark.parametrize(("name", "value"), [("ema_decay", 0.9), ("memory_format", "channels_last")])
def test_what_needs_whole_parameters_is_named(name: str, value: Any) -> None:
    told, request = experiment(**{name: value}), Asked(experiment="mine")
    check_shards(request, told, Layout(kind="ddp", nproc_per_node=2, shard="gradients"))
    with pytest.raises(UserError, match=f"{name}.*; use --shard gradients, or leave it out"):
        check_shards(request, told, Layout(kind="ddp", nproc_per_node=2, shard="parameters"))


def test_other_settings_of_ddp_stand_against_nothing() -> None:
    ddp = DdpOptions(bucket_cap_mb=1, gradient_as_bucket_view=True, find_unused_parameters=True)
    assert shards_refused_by(experiment(ddp=ddp)) is None
    check_shards(Asked(experiment="mine"), experiment(ddp=ddp), Layout(kind="ddp", nproc_per_node=2, shard="gradients"))
