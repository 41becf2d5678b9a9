"""Every benchmark still runs: one round of a few steps, nothing recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.turns import best_bare, summary
from ddp_lab.claims.measuring import wire
from tests.support.commands import command

ROOT = Path(__file__).parents[2]


def test_the_best_bare_loop_is_that_of_the_least_median_and_ratios_are_to_it() -> None:
    times = {"bare loop": (4.0, 4.0, 4.0), "bare, fused": (1.0, 2.0, 9.0), "ours": (0.5, 3.0, 9.0)}
    seconds = {name: [{"step": each} for each in turns] for name, turns in times.items()}
    assert best_bare(seconds) == "bare, fused"
    assert summary(seconds, base="bare, fused")["ours"]["ratio"] == 1.0
    assert summary(seconds)["ours"]["ratio"] == 0.75


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
        ("uneven_shares", "--shares auto"),
    ],
)
def test_the_quick_run_of_a_benchmark_ends_well(benchmark: str, said: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ended = command("--quick", "--json", record, program=("-m", *f"benchmarks.{benchmark}".split()))
    assert ended.code == 0, ended.errors
    assert said in ended.output
    document = json.loads(record.read_text())
    assert document["benchmark"] == benchmark.split()[0]
    assert document["rounds"] >= 1
    if benchmark == "fully_sharded" and wire.can_count():
        (plain, all_to_all, exact) = next(iter(document["results"]))["sent_bytes"].values()
        assert plain / exact == pytest.approx(4 / 3, rel=0.02)
        assert all_to_all / exact == pytest.approx(1, rel=0.02)
