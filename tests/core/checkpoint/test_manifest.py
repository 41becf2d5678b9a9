"""A manifest is believed only as it was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_core.checkpoint import find_checkpoints
from ddp_core.checkpoint.manifest import encode, pointed_step, taken_together
from tests.core.checkpoint.parts_cases import save
from tests.core.checkpoint.saved import saved


@pytest.mark.parametrize("text", ['{"step": 1e400}', '{"step": "1"}', '{"step": -1}', "[" * 100_000, "\x00"])
def test_a_pointer_that_points_nowhere_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    assert pointed_step(tmp_path / "best.json") is None


def test_no_flipped_bit_of_a_manifest_is_believed(tmp_path: Path) -> None:
    newest, older = saved(tmp_path, 10, 20)
    whole = newest.manifest.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 7
        newest.manifest.write_bytes(damaged)
        # A flip in white space may change nothing. The checkpoint that is read must then be the one that was written.
        assert find_checkpoints(tmp_path)[0] in (older, newest), f"position {position} of {whole!r}"


def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    [checkpoint] = saved(tmp_path / "checkpoints", 10)
    checkpoint.path.rename(tmp_path / checkpoint.file)
    checkpoint.manifest.write_bytes(encode(replace(checkpoint, file=f"../{checkpoint.file}")))
    assert find_checkpoints(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(("field", "value"), [("bytes", 3), ("sha256", "0" * 64), ("file", "step-000000010.pt")])
def test_a_manifest_whose_parts_do_not_fit_is_damaged(tmp_path: Path, field: str, value: Any) -> None:
    [checkpoint] = save(tmp_path, 2, 10)
    checkpoint.manifest.write_bytes(encode(replace(checkpoint, **{field: value})))
    assert find_checkpoints(tmp_path) == []
    outside = tuple(replace(part, file=f"../{part.file}") for part in checkpoint.parts)
    whole = taken_together(outside)
    checkpoint.manifest.write_bytes(encode(replace(checkpoint, parts=outside, file=whole.file)))
    assert find_checkpoints(tmp_path) == []
