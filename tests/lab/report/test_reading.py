"""How the report reads and judges run directories in any state, families of runs, claims and drills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_core.config.layout import Layout
from ddp_core.record.lock import RunLock
from ddp_lab.report import values
from ddp_lab.report.charts.learning import learning_plots, styles
from ddp_lab.report.reading.claims import read_findings
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import read_runs
from ddp_lab.report.sections.experiments import comparison_table
from tests.lab.report.files import ddp, write_claim, write_drill, write_everything, write_run


def test_every_directory_is_a_run_or_says_why_not(tmp_path: Path) -> None:
    write_everything(tmp_path)
    found = read_runs(tmp_path)
    assert len(found.runs) == 11
    assert {run.status for run in found.runs} == {"completed", "interrupted", "failed", "stopped"}
    problems = {broken.name.rpartition("-")[2]: broken.problem for broken in found.broken}
    assert problems["aaaaaa"] == "no run.json: it ended before its record was written"
    assert "no readable run.json" in problems["bbbbbb"]
    assert "experiment: Field required" in problems["cccccc"]
    assert "not of format ddp-run/1" in problems["dddddd"]


def test_a_run_that_somebody_works_in_is_running(tmp_path: Path) -> None:
    path = write_run(tmp_path, Layout(), status="running")
    assert read_runs(tmp_path).runs[0].status == "interrupted"
    with RunLock(path):
        assert read_runs(tmp_path).runs[0].status == "running"


def test_runs_made_by_claims_are_left_to_the_claims(tmp_path: Path) -> None:
    write_run(tmp_path, Layout())
    write_run(tmp_path / "claims" / "runs", Layout())
    found = read_runs(tmp_path)
    assert (len(found.runs), found.left_out) == (1, 1)


def test_families_are_one_experiment_over_seeds_and_layouts(tmp_path: Path) -> None:
    write_everything(tmp_path)
    family, toy = find_families(read_runs(tmp_path).runs)
    assert (family.title, toy.title) == ("digits", "toy")
    assert [group.label for group in family.groups] == [
        *("single-cpu", "dp-2-cpu", "ddp-1x2-cpu", "ddp-1x2-cpu · plain", "ddp-1x4-cpu")
    ]
    assert family.verdict.tone == "good"
    assert family.verdict.text == "identical on 3 layouts"
    assert {item.seed: item.tone for item in family.verdicts} == {0: "good", 1: "good", 2: "good"}
    assert family.common_seed == 0


def test_other_settings_are_another_family_named_by_the_difference(tmp_path: Path) -> None:
    write_run(tmp_path, Layout())
    write_run(tmp_path, ddp(2))
    other = write_run(tmp_path, Layout())
    record = json.loads((other / "run.json").read_text())
    record["experiment"]["optimizer"]["lr"] = 0.5
    (other / "run.json").write_text(json.dumps(record))
    main_one, different = find_families(read_runs(tmp_path).runs)
    assert (main_one.title, different.title) == ("digits", "digits, optimizer.lr=0.5")
    assert main_one.anchor != different.anchor


@pytest.mark.parametrize(
    ("reduction", "threads", "tone", "words"),
    [
        ("exact", 1, "bad", "digests differ"),
        ("exact", 2, "warn", "differ, on unlike machines"),
        ("plain", 1, "quiet", "nothing to compare yet"),
    ],
)
def test_unlike_digests_are_said_and_plain_runs_are_not_judged(
    tmp_path: Path, reduction: str, threads: int, tone: str, words: str
) -> None:
    write_run(tmp_path, Layout(), digest="a" * 64)
    fingerprint = {"torch": "2.13.0", "threads": threads}
    write_run(tmp_path, ddp(2), digest="b" * 64, reduction=reduction, fingerprint=fingerprint)
    verdict = find_families(read_runs(tmp_path).runs)[0].verdict
    assert (verdict.tone, verdict.text) == (tone, words)


def test_speed_up_is_against_the_single_runs_median(tmp_path: Path) -> None:
    for seed, speed in enumerate((900, 1000, 1300)):
        write_run(tmp_path, Layout(), seed=seed, speed=speed)
    write_run(tmp_path, ddp(2), speed=1500)
    write_run(tmp_path, ddp(4), status="failed", speed=9000)
    family = find_families(read_runs(tmp_path).runs)[0]
    gains = {group.label: family.speed_up(group) for group in family.groups}
    assert gains["ddp-1x2-cpu"] == values.Spread(1.5, 1.5, 1.5, 1)
    assert gains["single-cpu"] == values.Spread(1.0, 0.9, 1.3, 3)
    assert gains["ddp-1x4-cpu"] is None
    rows = comparison_table(family).rows
    assert (rows[0][3].text, rows[0][3].note, rows[2][2].text) == ("1,000", "900 to 1,300", "0 of 1")
    row = [cell.text for cell in rows[1]]
    assert {"ddp-1x2-cpu", "1.50×", "75.0 %"} <= {*row}  # noqa: RUF001


def test_the_newest_of_a_claim_counts_and_odd_ones_are_said(tmp_path: Path) -> None:
    write_claim(tmp_path, verdict="refuted", measured_at="2026-01-02T00:00:00Z")
    write_claim(tmp_path / "old", verdict="confirmed", measured_at="2026-01-01T00:00:00Z")
    write_claim(tmp_path, id="C07").write_text('{"format": "ddp-cl')
    write_claim(tmp_path, id="C08", format="other/1")
    write_claim(tmp_path, id="C09", verdict=[])
    write_drill(tmp_path)
    found = read_findings(tmp_path)
    assert [(claim.id, claim.verdict) for claim in found.claims] == [("C06", "refuted")]
    assert [name for name, _ in found.unreadable] == ["claims/C07.json", "claims/C08.json", "claims/C09.json"]
    assert len(found.drills) == 1


def test_lines_are_one_seed_and_bands_reach_over_all(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path, Layout(), seed=seed)
    write_run(tmp_path, ddp(2), seed=1)
    family = find_families(read_runs(tmp_path).runs)[0]
    assert family.common_seed == 1
    plots = {plot.name: plot for plot in learning_plots(family, styles([family]))}
    assert set(plots) == {f"digits-{name}" for name in ("train-loss", "test-loss", "test-accuracy")}
    first = plots["digits-test-loss"].table.rows[0]
    assert [cell.order for cell in first[2:]] == pytest.approx([1 / 6, 1 / 7, 1 / 5])
