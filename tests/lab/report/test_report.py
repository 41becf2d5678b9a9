"""The report's reading and judging: run directories in any state, claims, drills, and what is made of them."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_core.errors import ExitCode, UserError
from ddp_core.run.lock import RunLock
from ddp_lab.report import main, values
from ddp_lab.report.charts.claims import claim_plots
from ddp_lab.report.charts.layouts import layout_plots, styles
from ddp_lab.report.charts.learning import learning_plots
from ddp_lab.report.page import write_report
from ddp_lab.report.reading.claims import Claim, read_findings
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import curves, read_runs
from ddp_lab.report.sections.experiments import comparison_table
from ddp_lab.report.serving import address, make_server
from tests.lab.report.files import claim, ddp, dp, single, write_claim, write_drill, write_everything, write_run
from tests.support.processes import HANG


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
    path = write_run(tmp_path, single(), status="running")
    assert read_runs(tmp_path).runs[0].status == "interrupted"
    with RunLock(path):
        assert read_runs(tmp_path).runs[0].status == "running"


@pytest.mark.parametrize("line", ['{"kind": "resume"}', "\x00\xff", '{"kind": "step", "step": "x", "loss": []}', "[]"])
def test_odd_metrics_do_not_stop_the_report(tmp_path: Path, line: str) -> None:
    path = write_run(tmp_path, single())
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    run = read_runs(tmp_path).runs[0]
    assert run.problem is not None or len(run.curves["train_loss"].steps) == 4


def test_odd_fields_of_a_record_do_not_stop_the_report(tmp_path: Path) -> None:
    write_run(tmp_path, single(), steps=0, attempts=[{}], environment={}, fingerprint={}, question=None)
    odd = {"samples_per_second": "fast", "time_split": "none"}
    write_run(tmp_path, ddp(2), steps=0, result=odd, environment={"packages": [1]})
    write_run(tmp_path, ddp(2), layout={"kind": "tp"})
    write_report(tmp_path, tmp_path / "report")
    found = read_runs(tmp_path)
    assert (len(found.runs), len(found.broken)) == (2, 1)
    assert "kind" in found.broken[0].problem


def test_runs_made_by_claims_are_left_to_the_claims(tmp_path: Path) -> None:
    write_run(tmp_path, single())
    write_run(tmp_path / "claims" / "runs", single())
    found = read_runs(tmp_path)
    assert (len(found.runs), found.left_out) == (1, 1)


def test_the_clock_begins_before_the_first_record_and_skips_pauses() -> None:
    records = [
        {"kind": "step", "time": 102.0, "step": 10, "loss": 1.0, "samples_per_second": 50.0},
        {"kind": "step", "time": 104.0, "step": 20, "loss": 0.5},
        {"kind": "resume", "time": 9000.0, "step": 20},
        {"kind": "step", "time": 9003.0, "step": 30, "loss": 0.25},
        {"kind": "evaluation", "time": 9004.0, "step": 30, "test_loss": 0.5, "note": "x"},
    ]
    found = curves(records, 10.0)
    assert found["train_loss"].seconds == [2.0, 4.0, 7.0]
    assert found["train_loss"].steps == [10, 20, 30]
    assert found["test_loss"].seconds == [8.0]
    assert set(found) == {"train_loss", "test_loss"}


def test_families_are_one_experiment_over_seeds_and_layouts(tmp_path: Path) -> None:
    write_everything(tmp_path)
    family, toy = find_families(read_runs(tmp_path).runs)
    assert (family.title, toy.title) == ("digits", "toy")
    assert [group.label for group in family.groups] == [
        *("single-cpu", "dp-2-cpu", "ddp-1x2-cpu", "ddp-1x2-cpu · plain", "ddp-1x4-cpu"),
    ]
    assert family.verdict.tone == "good"
    assert family.verdict.text == "identical on 3 layouts"
    assert {item.seed: item.tone for item in family.verdicts} == {0: "good", 1: "good", 2: "good"}
    assert family.common_seed == 0


def test_other_settings_are_another_family_named_by_the_difference(tmp_path: Path) -> None:
    write_run(tmp_path, single())
    write_run(tmp_path, ddp(2))
    other = write_run(tmp_path, single())
    record = json.loads((other / "run.json").read_text())
    record["experiment"]["optimizer"]["lr"] = 0.5
    (other / "run.json").write_text(json.dumps(record))
    main_one, different = find_families(read_runs(tmp_path).runs)
    assert (main_one.title, different.title) == ("digits", "digits, optimizer.lr=0.5")
    assert main_one.anchor != different.anchor


@pytest.mark.parametrize(
    ("threads", "tone", "words"),
    [(1, "bad", "digests differ"), (2, "warn", "differ, on unlike machines")],
)
def test_unlike_digests_are_said(tmp_path: Path, threads: int, tone: str, words: str) -> None:
    write_run(tmp_path, single(), digest="a" * 64)
    write_run(tmp_path, ddp(2), digest="b" * 64, fingerprint={"torch": "2.13.0", "threads": threads})
    verdict = find_families(read_runs(tmp_path).runs)[0].verdict
    assert (verdict.tone, verdict.text) == (tone, words)


def test_plain_runs_are_not_judged(tmp_path: Path) -> None:
    write_run(tmp_path, single(), digest="a" * 64)
    write_run(tmp_path, ddp(2), digest="b" * 64, reduction="plain")
    assert find_families(read_runs(tmp_path).runs)[0].verdict.tone == "quiet"


def test_speed_up_is_against_the_single_runs_median(tmp_path: Path) -> None:
    for seed, speed in enumerate((900, 1000, 1300)):
        write_run(tmp_path, single(), seed=seed, speed=speed)
    write_run(tmp_path, ddp(2), speed=1500)
    write_run(tmp_path, ddp(4), status="failed", speed=9000)
    family = find_families(read_runs(tmp_path).runs)[0]
    gains = {group.label: family.speed_up(group) for group in family.groups}
    assert gains["ddp-1x2-cpu"] == values.Spread(1.5, 1.5, 1.5, 1)
    assert gains["single-cpu"] == values.Spread(1.0, 0.9, 1.3, 3)
    assert gains["ddp-1x4-cpu"] is None
    table = comparison_table(family)
    row = {column.title: cell.line for column, cell in zip(table.columns, table.rows[1], strict=True)}
    assert row["layout"] == "ddp-1x2-cpu"
    assert row["speed-up"] == "1.50×"  # noqa: RUF001
    assert row["efficiency"] == "75.0 %"
    assert table.rows[0][3].line == "1,000 (900 to 1,300)"
    assert table.rows[2][2].text == "0 of 1"


def test_without_a_single_run_there_is_no_speed_up(tmp_path: Path) -> None:
    write_run(tmp_path, ddp(2))
    write_run(tmp_path, dp(2))
    family = find_families(read_runs(tmp_path).runs)[0]
    names = [plot.title for plot in layout_plots(family, styles([family]))]
    assert names == ["Throughput", "Memory", "Processor use", "Where a step's time goes"]


def test_a_measured_split_is_shown_part_by_part(tmp_path: Path) -> None:
    split = {"data": 0.001, "forward": 0.01, "backward": 0.02, "exposed_communication": 0.005, "optimizer": 0.002}
    write_run(tmp_path, single(), result={"time_split": split | {"exposed_communication": 0.0}})
    write_run(tmp_path, ddp(2), result={"time_split": split})
    family = find_families(read_runs(tmp_path).runs)[0]
    plot = layout_plots(family, styles([family]))[-1]
    assert [entry.get_text() for entry in plot.figure.legends[0].get_texts()] == [
        *("waiting for data", "forward", "backward", "exposed communication", "optimizer"),
    ]
    assert [cell.order for cell in plot.table.rows[1][1:]] == pytest.approx([1, 10, 20, 5, 2])
    assert plot.table.rows[0][4].order is None


def test_without_a_split_the_wait_for_data_is_told_from_the_rest(tmp_path: Path) -> None:
    write_run(tmp_path, single(), speed=500, result={"data_wait": 0.25})
    split = read_runs(tmp_path).runs[0].time_split()
    assert split == pytest.approx({"data": 0.025, "computing and communication": 0.075})


def test_lines_are_one_seed_and_bands_reach_over_all(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path, single(), seed=seed)
    write_run(tmp_path, ddp(2), seed=1)
    family = find_families(read_runs(tmp_path).runs)[0]
    assert family.common_seed == 1
    plots = {plot.name: plot for plot in learning_plots(family, styles([family]))}
    assert set(plots) == {
        f"digits-{name}-over-{place}"
        for name in ("train-loss", "test-loss", "test-accuracy")
        for place in ("steps", "time")
    }
    first = plots["digits-test-loss-over-steps"].table.rows[0]
    assert [cell.order for cell in first[3:]] == pytest.approx([1 / 6, 1 / 7, 1 / 5])


def test_the_newest_of_a_claim_counts_and_odd_ones_are_said(tmp_path: Path) -> None:
    write_claim(tmp_path, verdict="refuted", measured_at="2026-01-02T00:00:00Z")
    write_claim(tmp_path / "old", verdict="confirmed", measured_at="2026-01-01T00:00:00Z")
    write_claim(tmp_path, id="C07").write_text('{"format": "ddp-cl')
    write_claim(tmp_path, id="C08", format="other/1")
    write_claim(tmp_path, id="C09", verdict=[])
    write_drill(tmp_path)
    found = read_findings(tmp_path)
    assert [(measured.claim.id, measured.claim.verdict) for measured in found.claims] == [("C06", "refuted")]
    assert [name for name, _ in found.unreadable] == ["claims/C07.json", "claims/C08.json", "claims/C09.json"]
    assert len(found.drills) == 1


def test_categories_stand_apart_and_sweeps_are_joined() -> None:
    def joined(values: list[str]) -> list[bool]:
        axis = {"name": "way", "values": values}
        lines = [{"name": name, "values": [1, None, 3]} for name in ("a", "b")]
        series = [{"title": "t", "x": axis, "y": {"name": "ms"}, "lines": lines}]
        (plot,) = claim_plots(Claim.model_validate(claim(series=series)))
        assert [[cell.text for cell in row[:3]] for row in plot.table.rows] == [
            ["a", values[0], "1.00"],
            ["a", values[2], "3.00"],
            ["b", values[0], "1.00"],
            ["b", values[2], "3.00"],
        ]
        return [line.get_linestyle() != "None" for line in plot.figure.axes[0].lines]

    assert joined(["before", "during", "after"]) == [False, False]
    assert joined(["1", "5", "25"]) == [True, True]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (3, "3"),
        (1234, "1,234"),
        (1.5, "1.50"),
        (0.0123, "0.0123"),
        (1234.5, "1,234"),
        (1e-7, "1.00e-07"),
        (None, values.ABSENT),
    ],
)
def test_numbers_have_three_digits(number: float | None, shown: str) -> None:
    assert values.number(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.5, "0.500 s"), (12.34, "12.3 s"), (65, "1 min 05 s"), (7380, "2 h 03 min")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert values.duration(seconds) == shown


def test_the_command_writes_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, single(), steps=0)
    write_claim(tmp_path, series=[])
    (tmp_path / "digits" / "ddp-1x2-cpu-20260101T000100Z-aaaaaa" / "checkpoints").mkdir(parents=True)
    assert main(["--output", str(tmp_path), "--to", str(tmp_path / "here")]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("report: 1 run, 1 experiment, 1 claim -> ")
    assert "no run.json" in captured.err
    assert (tmp_path / "here" / "index.html").exists()
    assert {file.suffix for file in (tmp_path / "here" / "plots").iterdir()} == {".svg", ".png"}


def test_the_users_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "none")]) == ExitCode.BAD_INPUT
    (tmp_path / "file").write_text("")
    assert main(["--output", str(tmp_path), "--to", str(tmp_path / "file")]) == ExitCode.RESOURCES
    assert main(["--output", str(tmp_path), "--serve", "8000"]) == ExitCode.BAD_INPUT
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all(line.startswith("report: error: ") for line in errors)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A served folder with a secret beside it."""
    folder = tmp_path / "report"
    (folder / "plots").mkdir(parents=True)
    (folder / "index.html").write_text("the page")
    (folder / ".hidden").write_text("secret")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    with make_server(folder, ("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()
        thread.join(5)


def _fetch(url: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=HANG) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, ""


def test_the_server_shows_the_folder_and_nothing_else(site: tuple[str, Path]) -> None:
    url, _ = site
    assert _fetch(f"{url}/") == (200, "the page")
    for path in ("plots/", "link.txt", ".hidden", "../secret.txt", "%2e%2e/secret.txt", "none.html"):
        assert _fetch(f"{url}/{path}")[0] == 404, path
    assert _fetch(f"{url}/index.html", "POST")[0] == 501


def test_a_port_in_use_is_said(site: tuple[str, Path]) -> None:
    url, folder = site
    with pytest.raises(UserError, match="the port is in use") as caught:
        make_server(folder, ("127.0.0.1", int(url.rpartition(":")[2])))
    assert caught.value.exit_code == ExitCode.RESOURCES


def test_addresses() -> None:
    assert address("0.0.0.0:8000") == ("0.0.0.0", 8000)
    for words in ("8000", "localhost:", "localhost:http", "h:99999"):
        with pytest.raises(UserError, match="expected HOST:PORT"):
            address(words)
