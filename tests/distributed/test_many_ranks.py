"""Far more ranks than this machine has cores: the same result, and records that stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ddp, trained

SECONDS = 1200


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("count", [64, 128])
def test_two_steps_on_many_ranks_end_with_the_digest_of_one_process(count: int, tmp_path: Path) -> None:
    words = ["digits", "--device", "cpu", "--set", f"global_batch_size={count}"]
    words += ["--set", "micro_batch=1", "--set", "max_steps=2"]
    many = ["--layout", "ddp", "--nproc-per-node", str(count)]
    alone = ddp("train", *words, "--layout", "single", "--output", tmp_path / "alone", timeout=SECONDS)
    together = ddp("train", *words, *many, "--output", tmp_path / "together", timeout=SECONDS)
    assert (alone.code, together.code, together.errors) == (0, 0, "")
    assert len(together.output.splitlines()) < 20

    (_, expected), (directory, record) = trained(tmp_path / "alone"), trained(tmp_path / "together")
    assert record["weights_sha256"] == expected["weights_sha256"]
    assert (directory.path / "run.json").stat().st_size < 20_000
    assert ddp("compare", "--output", tmp_path / "together").code == 0
