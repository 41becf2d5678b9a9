"""Every benchmark still runs: one round of a few steps, nothing recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.turns import Seconds, Turn, best_bare, summary, take_turns
from ddp_lab.claims.measuring import wire
from tests.support.processes import HANG, run_processes
from tests.support.wording import refusing

ROOT = Path(__file__).parents[2]


def counting(start: float) -> Turn:
    """A contender whose turns report start, start + 1, … seconds."""
    seconds = start

    def turn() -> Seconds:
        nonlocal seconds
        seconds += 1
        return {"step": seconds - 1}

    return turn


def failing() -> Turn:
    """A contender that cannot be built."""
    raise ValueError("no such peer")


@pytest.mark.slow
def test_contenders_take_turns_and_are_compared_round_by_round() -> None:
    seconds = take_turns({"first": (counting, [1.0]), "second": (counting, [3.0])}, rounds=3)
    # The first turn of each contender is a warm-up and is not counted.
    assert seconds == {
        "first": [{"step": 2.0}, {"step": 3.0}, {"step": 4.0}],
        "second": [{"step": 4.0}, {"step": 5.0}, {"step": 6.0}],
    }
    table = summary(seconds)
    assert table["first"]["ratio"] == 1.0
    assert table["second"]["ratio"] == 5 / 3
    assert table["second"]["microseconds"] == 5e6


def test_the_best_bare_loop_is_that_of_the_least_median_and_ratios_are_to_it() -> None:
    times = {"bare loop": (4.0, 4.0, 4.0), "bare, fused": (1.0, 2.0, 9.0), "ours": (0.5, 3.0, 9.0)}
    seconds = {name: [{"step": each} for each in turns] for name, turns in times.items()}
    assert best_bare(seconds) == "bare, fused"
    assert summary(seconds, base="bare, fused")["ours"]["ratio"] == 1.0
    assert summary(seconds)["ours"]["ratio"] == 0.75


def all_to_all_sum(rank: int, world_size: int) -> list[float]:
    """This rank's part of the sum of 0, 1, 2, … times each rank's number, by benchmarks.fully_sharded."""
    import torch
    import torch.distributed as dist

    from benchmarks.fully_sharded import AllToAll

    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    own = torch.arange(2.0 * world_size) * (rank + 1)
    part = AllToAll().allocate((2,), dtype=torch.float32, device=torch.device("cpu"))
    AllToAll()(part, own, dist.group.WORLD, dist.ReduceOp.SUM)
    dist.destroy_process_group()
    return part.tolist()


@pytest.mark.full
def test_fsdp2_with_an_all_to_all_gives_each_rank_its_part_of_the_sum() -> None:
    assert run_processes(all_to_all_sum, 3) == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]


@pytest.mark.slow
def test_a_contender_that_fails_is_named() -> None:
    with refusing(RuntimeError):
        take_turns({"first": (counting, [1.0]), "second": (failing, [])}, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "said"),
    [
        ("trainer_step --no-peers", "bare loop"),
        ("exact_end_to_end", "same micro-batches"),
        ("sampler", "ElasticSampler"),
        ("checkpoint", "recorded in"),
        ("long_run", "bytes per step"),
        ("loader", "host part ahead"),
        ("whole_run", "bare script"),
        ("guard", "toy_mlp, ddp x 2"),
        ("recovery", "worker joins, live"),
        ("sharded", "exact, gradients"),
        ("fully_sharded", "parameters, exact"),
        ("shard_memory", "parameters"),
        ("numerics", "convolution"),
    ],
)
def test_the_quick_run_of_a_benchmark_ends_well(benchmark: str, said: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{benchmark} --quick --json {record}".split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    document = json.loads(record.read_text())
    assert document["benchmark"] == benchmark.split()[0]
    assert document["rounds"] >= 1
    if benchmark == "fully_sharded" and wire.can_count():
        (plain, all_to_all, exact) = next(iter(document["results"]))["sent_bytes"].values()
        assert plain / exact == pytest.approx(4 / 3, rel=0.02)
        assert all_to_all / exact == pytest.approx(1, rel=0.02)
