"""Bound and forecast beside published runs; the pages that print them; which run counts as the user's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from ddp_lab.projection import main
from ddp_lab.projection.costs import Link
from ddp_lab.projection.forecast import beside, compare, forecast_errors, whole_node
from ddp_lab.projection.hardware import GPUS, LINKS, cluster_of
from ddp_lab.projection.published import HELD_OUT, KNOWN, Published
from ddp_lab.projection.table import markdown_row

ROOT = Path(__file__).parents[3]
ROWS = {(row["what"], row["ranks"]): row for row in compare()}
LI = HELD_OUT[-1]


def bound(result: Published) -> float:
    """The model's efficiency for a run."""
    (row,) = compare([result])
    return float(row["modelled"])


def test_the_bound_is_above_what_was_published_but_for_the_one_run_that_the_page_names() -> None:
    below = [row["what"] for row in ROWS.values() if row["published"] >= row["modelled"]]
    assert below == ["Horovod, VGG-16"]


def test_a_forecast_is_the_bound_less_what_the_same_publication_loses_on_one_node() -> None:
    node, more = ROWS["V100 nodes, mixed", 8], ROWS["V100 nodes, mixed", 32]
    assert node["published"] == pytest.approx(6154.66 / 802.9 / 8)
    assert node["forecast"] is None
    assert more["forecast"] == pytest.approx(more["modelled"] * node["published"] / node["modelled"])


def test_publications_are_held_out_and_named() -> None:
    sources = {result.source for result in HELD_OUT}
    assert len(sources) >= 5
    assert not sources & {result.source for result in KNOWN}
    assert all("github.com/" in source or "arXiv" in source for source in sources)
    # PyTorch prints the speed of one GPU: 306 of 329 samples per second.
    assert ROWS["DDP, ResNet-50", 16]["published"] == pytest.approx(306 / 329)


def test_the_page_has_every_run_on_several_nodes_as_it_is_computed() -> None:
    page = (ROOT / "docs/explanation/scaling-out.md").read_text().splitlines()
    printed = {line for line in page if re.match(r"\| .*, \d+ GPUs \|", line)}
    expected = {markdown_row(row) for row in ROWS.values() if row["ranks"] > row["cluster"]["per_node"]}
    assert printed == expected


def test_the_page_says_what_the_held_out_runs_say() -> None:
    page = " ".join((ROOT / "docs/explanation/scaling-out.md").read_text().split())
    held = sorted(row["forecast_error"] for row in compare() if row["held_out"] and row["forecast_error"] is not None)
    assert f"the {len(held)} held-out forecasts are off by {100 * held[0]:+.1f} to {100 * held[-1]:+.1f} %" in page
    assert f"{100 * median(held):.1f} % in the median" in page
    beyond = [row["modelled"] / row["published"] - 1 for row in ROWS.values()]
    assert f"bound {100 * max(beyond):.0f} % too high to {-100 * min(beyond):.0f} % too low" in page
    assert f"it is {100 * max(beyond):.0f} % too high" in page
    vgg = next(result for result in HELD_OUT if result.what == "Horovod, VGG-16")
    assert f"of 64 MiB the bound would be {100 * bound(replace(vgg, bucket_bytes=64 * 2**20)):.1f} %" in page
    # Li et al.: what batch, buckets and network would have to be for 50 %.
    small = replace(LI, gpu=replace(LI.gpu, batch=32))
    assert f"With a batch of 32 the bound is {100 * bound(small):.1f} %" in page
    assert f"in one bucket {100 * bound(replace(small, bucket_bytes=1e9)):.1f} %" in page
    for result, rate in ((LI, 3.3), (small, 14.0)):
        between = Link("", 14e-6, rate * 1e9 / 8, "", "network")
        assert bound(replace(result, cluster=replace(result.cluster, between=between))) == pytest.approx(0.5, abs=0.003)
        assert f"{rate:g} Gbit/s" in page


def test_the_how_to_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--skip-measuring", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/how-to/project-scaling.md").read_text().splitlines()
    first = lines.index("projected: a100-amp, 256 samples per GPU and step, 102 MB of gradients,")
    of_here = ("  fitted here", "written to")
    wanted = [line for line in lines[first:] if not line.startswith(of_here)]
    shown = page[page.index(lines[first]) :]
    shown = [line for line in shown[: shown.index("```")] if not line.startswith(of_here)]
    assert shown == wanted


def test_the_tutorial_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/tutorials/from-one-gpu-to-many-nodes.md").read_text().splitlines()
    command = next(line for line in page if line.startswith("ddp project "))
    assert main([*command.split()[2:], "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = page[page.index("projected: a100-amp, 16 samples per GPU and step, 4000 MB of gradients,") :]
    shown = shown[: shown.index("…")]
    first = printed.index(shown[0])
    assert printed[first : first + len(shown)] == shown


def test_the_how_to_says_where_exact_is_modelled_faster(tmp_path: Path) -> None:
    words = ["--gpu", "v100-fp32", "--network", "100gbit", "--ranks", "16", "--skip-measuring"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "projection" / "projection.json").read_text())["projection"]
    exact, nccl = (f"{100 * row[way]['efficiency']:.1f} %" for way in ("exact", "nccl"))
    assert f"(V100, 100 Gbit/s: {exact} beside {nccl})" in (ROOT / "docs/how-to/project-scaling.md").read_text()


class TestMatching:
    def test_a_run_counts_in_nodes_like_its_own_alone(self) -> None:
        gpu = GPUS["v100-fp32"]
        assert whole_node(gpu, cluster_of(gpu, network="100gbit")) in KNOWN
        assert beside(gpu, cluster_of(gpu, network="100gbit"), 32) is not None
        for other in (
            cluster_of(gpu, network="10gbit"),
            cluster_of(gpu, 1, network="100gbit"),
            cluster_of(gpu, link="pcie3", network="100gbit"),
        ):
            assert whole_node(gpu, other) is None
            assert all(beside(gpu, other, ranks) is None for ranks in (8, 16, 32))

    def test_what_was_assumed_is_nobodys_run(self) -> None:
        assert beside(LI.gpu, LI.cluster, LI.ranks) is None

    def test_without_such_a_run_there_is_the_bound_alone(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--gpu", "v100-fp32", "--network", "10gbit", "--gpus-per-node", "1", "--ranks", "16,256"]
        assert main([*words, "--skip-measuring", "--output", str(tmp_path)]) == 0
        assert "in nodes with these links and this network" in capsys.readouterr().out
        rows = json.loads((tmp_path / "projection" / "projection.json").read_text())["projection"]
        assert all(row["forecast"] is None and row["published"] is None for row in rows)

    def test_the_links_are_the_gpus_own_where_none_is_named(self, tmp_path: Path) -> None:
        assert main(["--gpu", "v100-fp32", "--ranks", "8", "--skip-measuring", "--output", str(tmp_path)]) == 0
        content = json.loads((tmp_path / "projection" / "projection.json").read_text())
        assert (content["link"]["bandwidth"], content["network"]["name"]) == (120e9, "400gbit")
        assert LINKS["nvlink-a100"].bandwidth == 240e9


def test_how_far_forecasts_were_checked() -> None:
    errors, largest = forecast_errors()
    assert (len(errors), largest) == (20, 32)
