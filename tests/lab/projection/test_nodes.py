"""The model of nodes: what leaves a node, counted by hand; its fit, on made-up points; its check of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from ddp_lab.projection import main
from ddp_lab.projection.costs import Traffic, Way, traffic
from ddp_lab.projection.fit import Fitted
from ddp_lab.projection.nodes import (
    SIZE,
    Constants,
    Point,
    carried_lines,
    carried_over,
    check_nodes,
    fit,
    node_lines,
    split,
)

RATES = (200, 1000, None)
TRUTH = Constants(2, 1e-9, 500e-6)


def written(
    folder: Path, shapes: tuple[tuple[int, int], ...] = ((2, 2), (3, 2), (2, 4), (2, 8)), noise: float = 0.0
) -> Path:
    """A file as benchmarks.nodes writes it, of times that the model makes; the fastest round comes second."""
    rows: list[dict[str, Any]] = []
    for nodes, per_node in shapes:
        for rate in RATES:
            rows.append({"nodes": nodes, "ranks_per_node": per_node, "mbit_per_second": rate, "ways": {}})
            for way in get_args(Way):
                point = Point(way, nodes, per_node, rate and rate * 1e6 / 8, 0.0)
                seconds = TRUTH.seconds(point) * (1 + noise * (per_node > 2))
                rows[-1]["ways"][way] = {"seconds": [2 * seconds, seconds, 3 * seconds]}
    path = folder / "nodes.json"
    path.write_text(json.dumps({"machine": {"cores": 2, "cpu": "this one"}, "results": rows}))
    return path


class TestTraffic:
    def test_a_ring_crosses_a_link_once_whatever_the_ranks(self) -> None:
        # 8 ranks pass 14/8 of the tensor each; the last of a node's four passes it to the other node.
        assert traffic("all_reduce", 2, 4) == Traffic(14 / 8, 3 * 14 / 8, 2, 12)

    def test_in_one_level_every_rank_crosses_the_link(self) -> None:
        # Each of 4 ranks sends 2 * 1/8 of the tensor to each of 4 ranks of the other node, and to 3 of its own.
        assert traffic("one level", 2, 4) == Traffic(4.0, 3.0, 8, 6)

    def test_in_two_levels_one_tensor_per_node_crosses(self) -> None:
        assert traffic("two levels", 2, 4) == Traffic(1.0, 6.0, 1, 6)
        assert traffic("two levels", 4, 2) == Traffic(1.5, 2.0, 6, 2)

    @pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 1), (2, 8), (3, 2), (5, 7)])
    def test_all_ways_copy_the_same_bytes(self, nodes: int, per_node: int) -> None:
        for way in get_args(Way):
            sent = traffic(way, nodes, per_node)
            assert nodes * (sent.across + sent.inside) == pytest.approx(2 * (nodes * per_node - 1)), way
            if nodes == 1:
                assert (sent.across, sent.messages_across) == (0, 0)


class TestSeconds:
    def test_while_the_link_is_busy_the_cores_copy(self) -> None:
        # 8 million bytes leave each node in full Ethernet frames; 24 million are copied meanwhile, which takes less.
        slow = Point("one level", 2, 2, 25e6, 0.0)
        assert TRUTH.seconds(slow) == pytest.approx(8e6 * 1514 / 1448 / 25e6 + 6 * 500e-6)
        unshaped = Point("one level", 2, 2, None, 0.0)
        assert TRUTH.seconds(unshaped) == pytest.approx(24e6 * 1e-9 / 2 + 6 * 500e-6)

    def test_in_two_levels_the_link_waits_for_the_nodes(self) -> None:
        # Inside, 16 million bytes are copied; then 4 million leave each node.
        point = Point("two levels", 2, 2, 25e6, 0.0)
        assert TRUTH.seconds(point) == pytest.approx(16e6 * 1e-9 / 2 + 4e6 * 1514 / 1448 / 25e6 + 3 * 500e-6)
        assert SIZE == 4e6


class TestCheck:
    def test_nodes_of_two_ranks_are_fitted_the_others_held_out(self, tmp_path: Path) -> None:
        found = check_nodes(written(tmp_path))
        assert found["fitted_points"] == 18
        assert {(row["nodes"], row["per_node"]) for row in found["held_out"]} == {(2, 4), (2, 8)}

    def test_finds_the_constants_that_made_the_points(self, tmp_path: Path) -> None:
        found = check_nodes(written(tmp_path))
        assert found["seconds_per_byte"] == pytest.approx(1e-9, rel=0.03)
        assert found["seconds_per_message"] == pytest.approx(500e-6, rel=0.03)
        assert found["largest_error"] < 0.03
        assert found["passed"]

    def test_can_fail(self, tmp_path: Path) -> None:
        found = check_nodes(written(tmp_path, noise=0.3))
        assert not found["passed"]
        assert found["median_error"] == pytest.approx(0.3 / 1.3, abs=0.02)
        assert "over the target of 15 %" in node_lines(found)[-1]

    def test_says_predicted_beside_measured(self, tmp_path: Path) -> None:
        table = node_lines(check_nodes(written(tmp_path)))
        assert sum(line.startswith(("2x4 ", "2x8 ")) for line in table) == 6
        assert any("1000 Mbit/s" in line for line in table)
        assert any("unshaped" in line for line in table)

    def test_no_points(self) -> None:
        with pytest.raises(ValueError, match="no points"):
            fit([], 2)
        assert split([]) == ([], [])


class TestCarriedOver:
    HERE = Fitted("all_reduce", 2, 500e-6, 1e-9, 1e-9, 2**20)

    def test_the_slower_of_link_and_cores_decides(self, tmp_path: Path) -> None:
        found = carried_over(written(tmp_path), self.HERE, "this one")
        assert found is not None
        rows = {(row["nodes"], row["per_node"], row["bytes_per_second"]): row for row in found["rows"]}
        # 8 ranks pass 14/8 of 4 MB over a link, in full Ethernet frames; without one, eight ranks share two cores.
        assert rows[2, 4, 25e6]["predicted"] == pytest.approx(14 / 8 * 4e6 * 1514 / 1448 / 25e6)
        assert rows[2, 4, None]["predicted"] == pytest.approx(self.HERE.seconds(8, 4e6))
        assert len(rows) == 12
        assert "nothing fitted on nodes" in carried_lines(found)[1]

    @pytest.mark.parametrize(("cores", "cpu"), [(2, "another"), (4, "this one")])
    def test_another_machine_says_nothing(self, cores: int, cpu: str, tmp_path: Path) -> None:
        here = Fitted("all_reduce", cores, 500e-6, 1e-9, 1e-9, 2**20)
        assert carried_over(written(tmp_path), here, cpu) is None
        assert "another machine" in carried_lines(None)[1]


class TestCommand:
    def test_the_check_is_printed_and_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--skip-measuring", "--nodes", str(written(tmp_path)), "--output", str(tmp_path)]
        assert main(words) == 0
        assert "error on 18 held-out points" in capsys.readouterr().out
        content = json.loads((tmp_path / "projection" / "projection.json").read_text())
        assert len(content["nodes"]["held_out"]) == 18
        assert content["projection"][-1]["exact"]["efficiency"] < 1

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (None, "cannot read"),
            ("{", "is not what"),
            ('{"results": 3}', "is not what"),
            ('{"results": [], "machine": {"cores": 2}}', "must have nodes of two ranks"),
        ],
    )
    def test_other_files_are_refused(
        self, text: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "nodes.json"
        if text is not None:
            path.write_text(text)
        assert main(["--skip-measuring", "--nodes", str(path), "--output", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert "python -m benchmarks.nodes" in said
