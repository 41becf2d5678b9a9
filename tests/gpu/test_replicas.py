"""What replicas and ranks do on CUDA devices: exact DP, several of them on one GPU, and which GPU a rank touches."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from ddp_core.base.errors import ExitCode
from ddp_core.base.seeds import share_of
from ddp_core.distributed.process_group import local_device, process_group
from ddp_core.distributed.world import World
from ddp_core.reduction import ExactReduction, OrderedSum
from ddp_core.reduction.exchange import goes_through_host
from ddp_core.reduction.parts import parts_on
from tests.distributed.exact_cases import sum_in_rounds
from tests.distributed.level_cases import leaves_of, subtrees
from tests.support.commands import command, trained
from tests.support.processes import run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MICRO_BATCHES = (5, 6, 7)
ELEMENTS = (1, 31, 100_003)


def on_cuda(kind: str, count: int) -> list[str]:
    return ["--device", "cuda", "--layout", kind, "--nproc-per-node", str(count)]


@pytest.mark.parametrize("option", [("ddp", "--backend", "nccl"), ("dp", "--reduction", "plain")], ids=" ".join)
def test_what_cannot_share_a_gpu_is_refused_with_what_would_run(option: tuple[str, ...], tmp_path: Path) -> None:
    kind, *words = option
    count = torch.cuda.device_count() + 1
    ended = command("train", "toy_mlp", *on_cuda(kind, count), *words, "--output", str(tmp_path), timeout=300)
    assert ended.code == ExitCode.RESOURCES
    assert "--device cpu" in ended.errors
    assert f"--nproc-per-node {count - 1}" in ended.errors


def _sums(rank: int, world_size: int) -> list[str]:
    """The sums of CUDA tensors over the ranks that are not those of the canonical tree on the CPU."""
    world, wrong = World.from_environment(), []
    device = local_device(world, "cuda")
    with process_group(world, device, 120):
        group = dist.group.WORLD
        assert group is not None
        shares_a_gpu = world_size > torch.cuda.device_count()
        assert goes_through_host(group, device) == shares_a_gpu
        nodes = [list(share_of(world_size, node, 2)) for node in range(2)]
        for leaves, elements, dtype in product(MICRO_BATCHES, ELEMENTS, (torch.float32, torch.bfloat16)):
            all_leaves = leaves_of(leaves, leaves, elements, dtype)
            (expected,) = subtrees(all_leaves, 0, leaves)
            share = share_of(leaves, rank, world_size)
            for name, ordered in (("one level", OrderedSum(group)), ("two levels", OrderedSum(group, nodes))):
                own = [part.to(device) for part in subtrees(all_leaves, share.start, share.stop)]
                out = own[-1] if own else torch.full_like(expected, float("nan"), device=device)
                ordered(own, out, leaves)
                if not torch.equal(out.cpu(), expected):
                    wrong.append(f"{name}: {leaves} leaves, {elements} elements, {dtype}")
            if not torch.equal(sum_in_rounds(parts_on(group, (), device), list(all_leaves.to(device))).cpu(), expected):
                wrong.append(f"in rounds: {leaves} leaves, {elements} elements, {dtype}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_between_gpus_are_those_of_the_cpu(world_size: int) -> None:
    assert run_processes(_sums, world_size, timeout=500) == [[]] * world_size


def _contexts(rank: int, world_size: int) -> list[int]:
    """The devices on which this rank holds memory after a step with the exact reduction."""
    world = World.from_environment()
    device = local_device(world, "cuda")
    with process_group(world, device, 120):
        module = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[device])
        with ExactReduction(module, 4) as exact:
            for index in exact.share:
                with exact.micro_batch(index):
                    module(torch.ones(2, 8, device=device)).sum().backward()
            exact.finish()
        held = [n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)]
        del exact, module
    return held


@pytest.mark.gpu2
def test_no_rank_touches_another_ranks_gpu() -> None:
    assert run_processes(_contexts, 2, timeout=500) == [[0], [1]]


@pytest.mark.gpu2
def test_nn_data_parallel_drops_what_one_process_drops(tmp_path: Path) -> None:
    """Other masks on the second device would give other gradients, not only other rounding."""
    weights = []
    for layout in (["--device", "cuda"], on_cuda("dp", 2)):
        output = tmp_path / layout[-1]
        plain = ["--reduction", "plain", "--set", "max_steps=2", "--output", str(output)]
        assert command("train", "digits", *plain, *layout, timeout=300).code == 0
        weights.append(load_file(trained(output)[0].path / "model.safetensors"))
    alone, together = weights
    for name, tensor in alone.items():
        if "running" not in name and "tracked" not in name:  # nn.DataParallel keeps those of the first device's part
            torch.testing.assert_close(together[name], tensor, rtol=1e-3, atol=1e-4)
