"""torch.compile keeps the promise: a compiled model ends with the same bits on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import train
from tests.support.layout_cases import FILES


@pytest.mark.slow
@pytest.mark.timeout(900)  # every process compiles for itself
def test_a_compiled_model_has_one_digest(tmp_path: Path) -> None:
    short = [FILES / "compiled.py", "--set", "max_steps=3"]
    alone = train(tmp_path / "single", *short)
    ranks = train(tmp_path / "ddp", *short, ranks=2)
    assert alone["weights_sha256"] == ranks["weights_sha256"]
