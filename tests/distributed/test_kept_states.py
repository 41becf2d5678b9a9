"""The states that a run keeps for an audit are the same on every layout, and where it was killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ddp, train
from tests.support.layout_cases import ADAMW_MLP

WORDS = (ADAMW_MLP, "--set", "max_steps=26", "--checkpoint-every", "4", "--keep-for-audit", "3", "--guard", "off")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of one process notes."""
    found: dict[str, Any] = train(tmp_path_factory.mktemp("single"), *WORDS)["kept"]
    assert [state["step"] for state in found["states"]] == [9, 18, 26]
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        pytest.param(("--layout", "dp", "--nproc-per-node", "2"), 0, marks=pytest.mark.slow),
        pytest.param((), 3, marks=pytest.mark.slow),
        # Its state lies on the ranks in more parts than that of any other layout.
        (("--shard", "parameters"), 2),
        pytest.param(("--shard", "optimizer"), 2, marks=pytest.mark.slow),
        pytest.param(("--shard", "gradients"), 3, marks=pytest.mark.slow),
    ],
    ids=["dp 2", "3 ranks", "parameters", "optimizer", "gradients"],
)
def test_they_are_the_same_on_every_layout(
    tmp_path: Path, kept: dict[str, Any], words: tuple[str, ...], ranks: int
) -> None:
    assert train(tmp_path, *WORDS, *words, ranks=ranks)["kept"] == kept


@pytest.mark.full
def test_a_resumed_run_goes_on_keeping_them_and_needs_no_option_for_that(tmp_path: Path, kept: dict[str, Any]) -> None:
    words = ("--synchronous-save", "--fault", "kill@14")
    assert ddp("train", *WORDS, *words, "--device", "cpu", "--output", tmp_path).code == -9
    without = [word for word in WORDS if word not in ("--keep-for-audit", "3")]
    assert train(tmp_path, *without, "--resume", "auto", ranks=2)["kept"] == kept
