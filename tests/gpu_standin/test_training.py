"""The trainers on devices that are played: every line runs that only CUDA reaches, and layouts have one digest."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_core.base.determinism import choose_kernels
from ddp_core.base.digests import weights_digest
from ddp_core.checkpoint.ranks import Ranks
from ddp_core.config.layout import Layout
from ddp_core.distributed.process_group import local_device, process_group
from ddp_core.distributed.world import World, free_port
from tests.core.trainers.builders import batch_norm_and_dropout, digests, experiment, finished, samples, trainer_of
from tests.gpu.test_speed import RaisesWhereTheHostWaits
from tests.gpu_standin.playing import on_devices, ranks_on_devices
from tests.support.commands import ddp, trained
from tests.support.standin_cuda import NAME, environment

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16, clipped": {"precision": "fp16", "clip_norm": 0.1},
    "bf16, averaged, tensor by tensor": {
        "precision": "bf16",
        "ema_decay": 0.9,
        "optimizer": {"name": "sgd", "lr": 0.1, "implementation": "foreach"},
    },
}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "exact": ("none", {}),
    "exact, as a graph": ("none", {"cuda_graph": True}),
    "plain": ("none", {}),
    "cut optimizer": ("optimizer", {}),
    "cut gradients": ("gradients", {}),
    "cut parameters": ("parameters", {}),
}
"""How ranks share the parameters, and further options."""


def _trained(fields: dict[str, Any], layout: Layout | None = None, **options: Any) -> tuple[str, str]:
    choose_kernels()
    record = experiment(**{"reduction": "exact", **fields})
    device = torch.device("cuda", 0)
    return digests(finished(record, _net, layout, train=samples(50), test=samples(20), device=device, **options))


def _net() -> nn.Module:
    return batch_norm_and_dropout()


def _in_one_process(fields: dict[str, Any]) -> dict[str, tuple[str, str]]:
    dp = Layout(kind="dp", device="cuda", nproc_per_node=3)
    return {
        "single": _trained(fields),
        "single, as a graph": _trained(fields, cuda_graph=True),
        "dp x 3 on two devices": _trained(fields, dp),
    }


def _ranks(rank: int, world_size: int, fields: dict[str, Any]) -> dict[str, str]:
    """The digests of the weights of several trainings, one after another, in one process group."""
    world = World.from_environment()
    device = local_device(world, "cuda")
    found = {}
    # Where ranks save together, one of the process groups is gloo's alone.
    with process_group(world, device, 60) as collectives, Ranks.meeting("", 60):
        for name, (shard, options) in WAYS.items():
            choose_kernels()
            layout = Layout(kind="ddp", device="cuda", nproc_per_node=world_size, shard=shard)
            record = experiment(**{"reduction": "plain" if "plain" in name else "exact", **fields})
            data = {"train": samples(50), "test": samples(20)}
            with trainer_of(record, _net, layout, device=device, collectives=collectives, **data, **options) as trainer:
                trainer.train()
                weights = trainer.state.ownership.whole_weights()
                assert weights is not None or rank, "rank 0 alone may have them whole"
                found[name] = "" if weights is None else weights_digest(weights)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_of_one_process_has_one_digest(kind: str) -> None:
    found = on_devices(2, _in_one_process, KINDS[kind])
    assert len(set(found.values())) == 1, found


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 1], ids=["one device each", "one device for both"])
def test_ranks_have_the_digest_of_one_process(devices: int) -> None:
    alone = on_devices(1, _trained, KINDS["fp32"])
    first, second = ranks_on_devices(devices, 2, _ranks, KINDS["fp32"])
    assert {name for name in first if second[name] not in ("", first[name])} == set()
    assert {name for name in first if "plain" not in name and first[name] != alone[0]} == set()


def test_the_command_trains_and_its_record_names_the_stand_in(tmp_path: Path) -> None:
    words = ["--device", "cuda", "--set", "max_steps=3", "--profile", "2:3", "--cuda-graph", "--output", tmp_path]
    ended = ddp("train", "toy_mlp", *words, env=environment(1))
    assert ended.code == 0, ended.errors
    record = trained(tmp_path)[1]
    assert record["environment"]["cuda"]["devices"] == [NAME]
    assert record["fingerprint"]["device"] == NAME


def _steps_without_waits(reduction: str, cuda_graph: bool) -> int:
    choose_kernels()
    record = experiment(reduction=reduction, clip_norm=1.0, ema_decay=0.9, schedule={"name": "cosine"})
    watch = RaisesWhereTheHostWaits()
    options = {"log_every": 1000, "cuda_graph": cuda_graph, "observers": [watch]}
    return finished(record, _net, train=samples(16 * 8), device=torch.device("cuda", 0), **options).steps.total


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("reduction", ["exact", "plain"])
def test_no_step_waits_for_the_device(reduction: str, cuda_graph: bool) -> None:
    assert on_devices(1, _steps_without_waits, reduction, cuda_graph) == 8


def _without_peers(error: str) -> list[str]:
    """What a rank says that NCCL has failed, and whether anything can be sent afterwards."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    device, said = torch.device("cuda", 0), []
    with contextlib.suppress(dist.DistBackendError), process_group(World(), device, 60, even_alone=True) as collectives:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        event = torch.cuda.Event()
        event.record()
        collectives.await_event(event)
        backend.get_error = lambda: SimpleNamespace(name=error)
        event.record()
        try:
            collectives.await_event(event)
        except dist.DistBackendError as failure:
            said.append(str(failure))
            raise
    return [*said, f"initialized: {dist.is_initialized()}"]


def test_a_rank_that_waits_for_its_device_hears_that_nccl_has_failed() -> None:
    found = on_devices(1, _without_peers, "COMM_ERROR")
    assert found == ["NCCL met a COMM_ERROR while this rank waited for its device", "initialized: False"]


@pytest.mark.slow
def test_a_run_is_rehearsed_by_as_many_ranks_as_share_a_device_and_witnessed(tmp_path: Path) -> None:
    """The ranks are forks here: the stand-in refuses any that come from a process that has asked the driver."""
    words = ["--device", "cuda", "--layout", "ddp", "--nproc-per-node", "2", "--output", tmp_path]
    ended = ddp("train", "toy_mlp", *words, "--rehearsal", "on", "--checkpoint-every", "1", env=environment(1))
    assert ended.code == 0, ended.errors
    assert "ddp-1x2-cuda, killed and resumed, have the same bits" in ended.errors
    assert "trained again on one process" in ended.output
