"""The trainers on devices that are played: every line runs that only CUDA reaches, and layouts have one digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.base.determinism import choose_kernels
from ddp_core.config.layout import SHARD_MODES, Layout
from ddp_core.distributed.process_group import local_device, process_group
from ddp_core.distributed.world import World
from tests.core.trainers.test_trainers import batch_norm_and_dropout, digests, experiment, finished, samples
from tests.gpu_standin.playing import on_devices, ranks_on_devices
from tests.support.commands import ddp, trained
from tests.support.standin_cuda import NAME, environment

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16, clipped": {"precision": "fp16", "clip_norm": 0.1},
    "bf16, averaged": {"precision": "bf16", "ema_decay": 0.9},
}


def _trained(fields: dict[str, Any], layout: Layout | None = None, **options: Any) -> tuple[str, str]:
    choose_kernels()
    record = experiment(**{"reduction": "exact", **fields})
    device = torch.device("cuda", 0)
    with torch.backends.mkldnn.flags(enabled=True):
        trainer = finished(record, _net, layout, train=samples(50), test=samples(20), device=device, **options)
    return digests(trainer)


def _net() -> nn.Module:
    return batch_norm_and_dropout()


def _in_one_process(fields: dict[str, Any]) -> dict[str, tuple[str, str]]:
    dp = Layout(kind="dp", device="cuda", nproc_per_node=3)
    return {
        "single": _trained(fields),
        "single, as a graph": _trained(fields, cuda_graph=True),
        "dp x 3 on two devices": _trained(fields, dp),
    }


def _rank(rank: int, world_size: int, fields: dict[str, Any], options: dict[str, Any]) -> tuple[str, str]:
    world = World.from_environment()
    device = local_device(world, "cuda")
    shard = options.pop("shard", "none")
    layout = Layout(kind="ddp", device="cuda", nproc_per_node=world_size, shard=shard)
    with process_group(world, device, 60) as collectives:
        choose_kernels()
        record = experiment(**{"reduction": "exact", **fields})
        trainer = finished(
            record, _net, layout, train=samples(50), test=samples(20), device=device, collectives=collectives, **options
        )
        return digests(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_of_one_process_has_one_digest(kind: str) -> None:
    found = on_devices(2, _in_one_process, KINDS[kind])
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("devices", [2, 1], ids=["one device each", "one device for both"])
def test_ranks_have_the_digest_of_one_process(devices: int) -> None:
    alone = on_devices(1, _trained, KINDS["fp16, clipped"])
    assert ranks_on_devices(devices, 2, _rank, KINDS["fp16, clipped"], {}) == [alone] * 2


def test_the_command_trains_and_its_record_names_the_stand_in(tmp_path: Path) -> None:
    words = ["--device", "cuda", "--set", "max_steps=3", "--output", tmp_path]
    ended = ddp("train", "toy_mlp", *words, env=environment(1))
    assert ended.code == 0, ended.errors
    record = trained(tmp_path)[1]
    assert record["environment"]["cuda"]["devices"] == [NAME]
    assert record["fingerprint"]["device"] == NAME
