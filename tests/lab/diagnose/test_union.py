"""What one process gets in the place of its own batches: those of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ddp_lab.diagnose import union
from ddp_lab.diagnose.union import ONE_BY_ONE, TOGETHER, Batches
from tests.support.processes import run_processes


def given(folder: Path, how: str, ranks: list[list[Any]], own: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What one process gets for its own batches, where ranks have had theirs."""
    for rank, batches in enumerate(ranks):
        monkeypatch.setattr(union, "place", lambda rank=rank: (rank, len(ranks), True))
        for index, batch in enumerate(batches):
            assert Batches(folder, "").of_loader(0, index, batch) is batch
    monkeypatch.setattr(union, "place", lambda: (0, 1, False))
    one = Batches(folder, how)
    return [one.of_loader(0, index, batch) for index, batch in enumerate(own)]


def test_batches_are_put_together_whatever_they_are_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [
        [({"ids": torch.full((2, 3), rank), "scale": 0.5}, [f"text {rank}"], torch.tensor([rank]), None)]
        for rank in range(2)
    ]
    ((words, texts, labels, nothing),) = given(tmp_path, TOGETHER, ranks, [0], monkeypatch)
    assert words["ids"].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert (words["scale"], texts, labels.tolist(), nothing) == (0.5, ["text 0", "text 1"], [0, 1], None)


def test_micro_batches_of_ranks_come_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [[f"{rank} {index}" for index in range(2)] for rank in range(2)]
    assert given(tmp_path, ONE_BY_ONE, ranks, list("abcd"), monkeypatch) == ["0 0", "1 0", "0 1", "1 1"]


@pytest.mark.parametrize(
    "ranks",
    [[[torch.ones(2, 3)], [torch.ones(2, 4)]], [[{"scale": 1}], [{"scale": 2}]], [[lambda: 0], [lambda: 0]], []],
)
def test_what_cannot_be_put_together_leaves_the_process_its_own(
    ranks: list[list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert given(tmp_path, TOGETHER, ranks, ["own"], monkeypatch) == ["own"]


def test_a_model_is_called_with_all_samples_only_where_no_loader_has_given_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in ("loader_0", "forward"):
        for rank in range(2):
            (tmp_path / f"{source}-0-{rank}").write_bytes(union.pickle.dumps([torch.full((1,), rank)]))
    one, other = Batches(tmp_path, TOGETHER), Batches(tmp_path, TOGETHER)
    called_with = [torch.ones(1)]
    ((given_to_it,), is_another) = one.in_forward(called_with)
    assert (given_to_it.tolist(), is_another) == ([0, 1], True)
    other.of_loader(0, 0, called_with)
    assert other.in_forward(called_with) == (called_with, False)


def test_what_is_drawn_for_a_batch_and_the_weights_are_those_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.zeros(2)
    for rank, world in ((0, 2), (1, 2), (0, 1)):
        monkeypatch.setattr(union, "place", lambda rank=rank, world=world: (rank, world, True))
        batches = Batches(tmp_path, TOGETHER)
        assert batches._drawn(torch.randn, 2, 3).shape == (2, 3), "before training all have their own"
        batches.of_loader(0, 0, torch.ones(1))
        noise = batches._drawn(torch.full, (2 if world > 1 else 4, 3), rank + 7)
        fixed = batches._drawn(torch.full, (5,), rank)
        batches.after_step(1, {"w": weights + 3 if world > 1 else weights})
    assert noise[:, 0].tolist() == [7, 7, 8, 8]
    assert fixed.tolist() == [0] * 5, "as many on any number of ranks"
    assert weights.tolist() == [3, 3]


def still(rank: int, world_size: int) -> None:
    Batches(Path(), "").install()
    transformer, norm = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.5), torch.nn.BatchNorm1d(8)
    rows, before = torch.randn(6, 8), torch.get_rng_state()
    transformer(rows)
    assert torch.equal(functional.dropout(rows, 0.5), rows)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(norm(rows)[:2], norm(rows[:2])), "statistics of the samples that are put in"


def test_nothing_is_random_or_of_the_samples_together() -> None:
    run_processes(still, 1)
