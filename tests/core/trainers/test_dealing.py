"""Micro-batches dealt by measured speed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ddp_core.observe.metrics import read_metrics
from ddp_core.trainers.dealing import dealt
from tests.support.commands import ddp, trained

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seconds", [(1.0, 2.0), (1.0, 1.0, 1.0), (3.0, 1.0, 7.0)])
def test_no_other_way_to_deal_ends_sooner(seconds: tuple[float, ...]) -> None:
    ends = {
        counts: max(count * each for count, each in zip(counts, seconds, strict=True))
        for counts in itertools.product(range(1, 12), repeat=len(seconds))
        if sum(counts) == 12
    }
    assert ends[dealt(12, seconds)] == min(ends.values())


def test_ranks_in_unlike_shares_fixed_or_measured_end_with_the_bits_of_equal_ones(tmp_path: Path) -> None:
    """Dealt as if rank 1 were slow, whatever is measured."""
    text = (ROOT / "experiments" / "toy_mlp.py").read_text()
    text += "\nimport ddp_core.trainers.dealing as dealing\ndealing.dealt = lambda micro_batches, seconds: (6, 2)\n"
    (tmp_path / "mine.py").write_text(text)
    words = [tmp_path / "mine.py", "--device", "cpu", "--set", "micro_batch=2", "--set", "epochs=12"]
    words += ["--set", "max_steps=30", "--set", "last_batch=keep", "--workers", "1"]
    digests = {}
    for shares in ("", "3,1", "auto"):
        output = tmp_path / f"shares {shares}"
        uneven = ["--layout", "ddp", "--nproc-per-node", "2", "--shares", shares] if shares else []
        ended = ddp("train", *words, *uneven, "--output", output)
        assert (ended.code, ended.errors) == (0, "")
        directory, record = trained(output)
        digests[shares] = record["weights_sha256"]
        records = read_metrics(directory.metrics, "dealt")
        assert [record["step"] for record in records] == [20] * (shares == "auto")
    assert records[0]["micro_batches"] == [6, 2]
    assert "from step 21 on ranks compute 6 + 2 micro-batches" in ended.output
    assert len(set(digests.values())) == 1


@pytest.mark.parametrize(
    "words", [("--reduction", "plain"), ("--nnodes", "1:2", "--rdzv-endpoint", "here:1", "--rdzv-id", "x")]
)
def test_what_would_change_bits_or_ranks_is_refused(words: tuple[str, ...]) -> None:
    ended = ddp("train", "toy_mlp", "--device", "cpu", "--layout", "ddp", "--shares", "3,1", *words)
    assert ended.code == 2
    assert "--shares" in ended.errors
