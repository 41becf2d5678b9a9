"""The projection: its formulas, checked by hand, and its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.config.layout import Layout
from ddp_core.record.directory import RunDirectory
from ddp_lab.projection import main
from ddp_lab.projection.formulas import FIRST_BUCKET, Link, buckets, exact_seconds, ring_seconds, step
from tests.support.records import EXPERIMENT, a_record

FAST, SLOW = Link(1e-6, 100e9), Link(10e-6, 10e9)
OWN = ["--samples-per-second=50", "--batch=16", "--gradient-mb=4000", "--link=300"]


def test_a_ring_sends_2_p_minus_1_messages_and_the_tensor_nearly_twice() -> None:
    assert ring_seconds(1e9, 4, 8, FAST, SLOW) == pytest.approx(6e-6 + 1.5e9 / 100e9)


def test_between_nodes_the_slower_link_decides() -> None:
    seconds = ring_seconds(1e9, 16, 8, FAST, SLOW)
    assert seconds == pytest.approx(28 * 1e-6 + 2 * 10e-6 + 2 * 15 / 16 * 1e9 / 10e9)


def test_the_exact_reduction_sends_one_tensor_of_each_node() -> None:
    inside = 14 * 1e-6 + 14 / 8 * 1e9 / 100e9
    assert exact_seconds(1e9, 8, 8, FAST, SLOW) == pytest.approx(inside)
    assert exact_seconds(1e9, 16, 8, FAST, SLOW) == pytest.approx(inside + 10e-6 + 1e9 / 10e9)
    assert exact_seconds(1e9, 32, 8, FAST, SLOW) == pytest.approx(inside + 60e-6 + 1.5e9 / 10e9)


def test_one_rank_has_nothing_to_say() -> None:
    assert ring_seconds(1e9, 1, 8, FAST, SLOW) == exact_seconds(1e9, 1, 8, FAST, SLOW) == 0


def test_buckets_hold_all_gradients_the_first_is_small() -> None:
    sizes = buckets(100e6)
    assert sizes[0] == FIRST_BUCKET
    assert sum(sizes) == pytest.approx(100e6)
    assert max(sizes) == 25 * 2**20


def test_of_communication_only_the_last_bucket_shows_when_the_link_is_fast() -> None:
    assert step(0.1, 100e6, lambda size: 0.0).efficiency == pytest.approx(1)
    found = step(0.1, 100e6, lambda size: size / 100e9)
    assert found.exposed == pytest.approx(buckets(100e6)[-1] / 100e9)


def test_a_slow_link_cannot_be_hidden() -> None:
    found = step(0.1, 100e6, lambda size: size / 0.1e9)
    assert found.communication == pytest.approx(1.0)
    assert found.exposed > 0.9


def test_a_table_of_ones_own_numbers_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OWN, "--network=50", "--ranks=1,4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "by formula, held against no run on several GPUs" in lines[0]
    assert lines[-2].split()[:4] == ["1", "320.0", "0.00", "100.0"]
    assert float(lines[-1].split()[1]) > 320


def test_a_run_of_one_rank_gives_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.write(a_record(EXPERIMENT, result={"samples_per_second": 50.0, "parameters": 10**9}))
    assert main([str(run.path), "--batch=16", "--link=300"]) == 0
    assert "16 samples per GPU and step in 320.0 ms, 4000 MB" in capsys.readouterr().out
    run.update(result={})
    assert main([str(run.path), "--link=300"]) == 2
    assert "name a run that is completed" in capsys.readouterr().err
    run.write(a_record(EXPERIMENT, Layout(kind="ddp", nproc_per_node=2)))
    assert main([str(run.path), "--link=300"]) == 2
    assert "name a run of one rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--link=string"], "argument --link: string is not a number above 0"),
        ([*OWN, "--network=-3"], "argument --network: -3 is not a number above 0"),
        ([*OWN, "--batch=0.5"], "0.5 is not a whole number from 1 to 1000000000"),
        ([*OWN, "--samples-per-second=inf"], "inf is not a number above 0"),
        ([*OWN, "--latency=nan"], "nan is not a number above 0"),
        ([*OWN, "--ranks=1,x"], "x is not a whole number from 1 to 1000000000"),
        ([*OWN, "--ranks=" + "9" * 400], "is not a whole number from 1 to 1000000000"),
        ([*OWN, "--gradient-mb=1e9"], "expected at most 10000000"),
        (["--link=300"], "name a RUN, or give"),
        (["--batch=16"], "--link"),
        (["--no-such"], "(see `ddp project --help`)"),
    ],
)
def test_bad_input_is_one_line(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
