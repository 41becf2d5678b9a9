"""Ring and double tree that run here: their trees on paper, their messages counted."""

from __future__ import annotations

import pytest

from ddp_lab.projection.counting import count, count_lines, formulas, neighbours


@pytest.mark.parametrize("ranks", range(2, 9))
def test_both_trees_reach_every_rank_once_and_inner_ranks_of_one_are_leaves_of_the_other(ranks: int) -> None:
    inner = []
    for mirrored in (False, True):
        tree = {rank: neighbours(rank, ranks, mirrored) for rank in range(ranks)}
        assert sum(up is None for up, _ in tree.values()) == 1
        children = sorted(child for _, down in tree.values() for child in down)
        assert children == sorted(rank for rank, (up, _) in tree.items() if up is not None)
        assert all(tree[child][0] == rank for rank, (_, down) in tree.items() for child in down)
        assert all(len(down) <= 2 for _, down in tree.values())
        inner.append({rank for rank, (up, down) in tree.items() if up is not None and down})
    assert not inner[0] & inner[1]


def test_a_tree_by_hand() -> None:
    assert [neighbours(rank, 4) for rank in range(4)] == [(None, [2]), (2, []), (0, [1, 3]), (2, [])]


@pytest.mark.slow
def test_what_runs_is_what_the_formulas_say() -> None:
    rows = {(row["shape"], row["ranks"]): row for row in count((2, 3, 4, 8))}
    assert all(row["right"] for row in rows.values())
    for ranks in (2, 3, 4, 8):
        found, expected = rows["ring", ranks], formulas("ring", ranks)
        assert (found["messages"], found["chain"]) == (2 * (ranks - 1), expected["chain"])
        assert found["sent"] == pytest.approx(expected["sent"])
        assert rows["tree", ranks]["sent"] <= 2.0
    assert [rows["tree", ranks]["chain"] for ranks in (2, 4, 8)] == [2, 4, 6]
    # Three ranks need two levels, where NCCL's estimate has the logarithm rounded down.
    assert (rows["tree", 3]["chain"], formulas("tree", 3)["chain"]) == (4, 2)
    assert "sums equal" in count_lines(list(rows.values()))[1]
