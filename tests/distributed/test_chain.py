"""The chain of a run is the same on every layout, and where it was killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_core.observe.chain import CHAIN
from tests.support.commands import ddp, train, trained
from tests.support.layout_cases import ADAMW_MLP

WORDS = (ADAMW_MLP, "--set", "max_steps=26", "--checkpoint-every", "4", "--keep-for-audit", "3", "--guard", "off")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a run of one process."""
    output = tmp_path_factory.mktemp("single")
    record = train(output, *WORDS)
    found = lines_of(output)
    assert json.loads(found[-1])["head"] == record["chain"]["head"]
    return found


def lines_of(output: Path) -> list[str]:
    return (trained(output)[0].path / CHAIN).read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        pytest.param(("--layout", "dp", "--nproc-per-node", "2"), 0, marks=pytest.mark.slow),
        ((), 3),
        # Of the three the one whose state lies on the ranks in the most parts.
        (("--shard", "parameters"), 2),
        pytest.param(("--shard", "optimizer"), 2, marks=pytest.mark.slow),
        pytest.param(("--shard", "gradients"), 3, marks=pytest.mark.slow),
    ],
    ids=["dp 2", "3 ranks", "parameters", "optimizer", "gradients"],
)
def test_it_is_the_same_on_every_layout(tmp_path: Path, lines: list[str], words: tuple[str, ...], ranks: int) -> None:
    train(tmp_path, *WORDS, *words, ranks=ranks)
    assert lines_of(tmp_path) == lines


def test_it_goes_on_where_a_killed_run_was_resumed_and_needs_no_option_for_that(
    tmp_path: Path, lines: list[str]
) -> None:
    words = ("--synchronous-save", "--fault", "kill@14")
    assert ddp("train", *WORDS, *words, "--device", "cpu", "--output", tmp_path).code == -9
    without = [word for word in WORDS if word not in ("--keep-for-audit", "3")]
    train(tmp_path, *without, "--resume", "auto", ranks=2)
    assert lines_of(tmp_path) == lines


def test_a_chain_that_lost_lines_is_told(tmp_path: Path) -> None:
    words = ("--synchronous-save", "--fault", "kill@14")
    assert ddp("train", *WORDS, *words, "--device", "cpu", "--output", tmp_path).code == -9
    (file,) = tmp_path.glob(f"*/*/{CHAIN}")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:8]))
    ended = ddp("train", *WORDS, "--resume", "auto", "--device", "cpu", "--output", tmp_path)
    assert ended.code == 3
    assert "ends with step 7, before the checkpoint of step 12" in ended.errors
