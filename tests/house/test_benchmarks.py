"""Every benchmark still runs: one round of a few steps, nothing recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.turns import Seconds, Turn, summary, take_turns
from tests.support.processes import HANG

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


@pytest.mark.slow
def test_a_contender_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="second: ValueError: no such peer"):
        take_turns({"first": (counting, [1.0]), "second": (failing, [])}, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "said"),
    [
        ("trainer_step --no-peers", "bare loop"),
        ("scaling", "ddp x 2 / single"),
        ("exact_end_to_end", "same micro-batches"),
        ("sampler", "ElasticSampler"),
        ("gpu", "the article's loop"),
        ("gpu_files", "the script's loader alone"),
        ("checkpoint", "recorded in"),
        ("durable", "recorded in"),
        ("long_run", "bytes per step"),
        ("loader", "host part ahead"),
        ("order_invariant", "long accumulator"),
        ("whole_run", "bare script"),
        ("guard", "ResNet-18, ddp x 2"),
        ("sharded", "exact, gradients"),
        ("fully_sharded", "parameters, exact"),
        ("shard_memory", "parameters"),
        ("numerics", "convolution"),
        pytest.param("adapters --peer Accelerate", "Accelerate", marks=pytest.mark.extras("accelerate")),
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
    assert json.loads(record.read_text())["benchmark"] == benchmark.split()[0]
