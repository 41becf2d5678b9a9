"""What an experiment draws, from whichever global generator and wherever, does not depend on the layout."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from tests.support.commands import ddp, train
from tests.support.layout_cases import digests

FILES = Path(__file__).with_name("experiment_files")
CASES = {
    "metrics": [str(FILES / "draws_metrics.py")],
    **{kind: [str(FILES / "draws.py"), "--set", f"model.kind={kind}"] for kind in ("forward", "own seed", "optimizer")},
}


@functools.cache
def alone() -> dict[str, tuple[str, str]]:
    """The digests of all cases in a single process; each case runs once."""
    with tempfile.TemporaryDirectory() as output:
        return digests(CASES, Path(output), "single", 1)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "count"), [("dp", 2), pytest.param("ddp", 3, marks=pytest.mark.slow)])
def test_what_is_drawn_is_the_same_on_every_layout(kind: str, count: int, tmp_path: Path) -> None:
    assert digests(CASES, tmp_path, kind, count) == alone()


@pytest.mark.full
def test_figures_that_are_drawn_are_the_same_on_every_layout(tmp_path: Path) -> None:
    one, two = (train(tmp_path / str(ranks), *CASES["metrics"], ranks=ranks)["result"] for ranks in (0, 2))
    for figure in ("test_drawn", "test_loss", "test_accuracy"):
        assert one[figure] == two[figure], figure


def test_processes_that_load_data_draw_the_same(tmp_path: Path) -> None:
    assert train(tmp_path, *CASES["forward"], "--workers", "2")["weights_sha256"] == alone()["forward"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["forward", *(pytest.param(name, marks=pytest.mark.slow) for name in ("metrics", "optimizer"))]
)
def test_a_run_that_was_killed_draws_on_elsewhere_as_if_it_never_was(name: str, tmp_path: Path) -> None:
    full = [*CASES[name], "--synchronous-save", "--checkpoint-every", "1", "--resume", "auto"]
    assert ddp("train", *full, "--fault", "kill@3", "--device", "cpu", "--output", tmp_path).code == -9
    record = train(tmp_path, *full, ranks=2)
    assert len(record["attempts"]) == 2
    assert (record["weights_sha256"], record["optimizer_sha256"]) == alone()[name]


@pytest.mark.full
def test_an_optimizer_that_draws_is_refused_under_shards(tmp_path: Path) -> None:
    words = ["train", *CASES["optimizer"], "--layout", "ddp", "--nproc-per-node", "2", "--shard", "optimizer"]
    ended = ddp(*words, "--device", "cpu", "--output", tmp_path)
    assert ended.code == 2
    assert "Langevin does not say that it updates each element by itself" in ended.errors
