"""What a record says of the checks of its run."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_core.record.recorded import was_rehearsed


@pytest.mark.parametrize(
    ("attempts", "is_so"),
    [
        (None, False),
        ([{}, {"guard": {"rehearsal": "not rehearsed: its data are others at each read"}}], False),
        ([{"guard": {"rehearsal": "rehearsed on 2026-11-29: one process and another have the same bits"}}, {}], True),
    ],
)
def test_a_run_was_rehearsed_where_one_of_its_attempts_was(attempts: list[dict[str, Any]] | None, is_so: bool) -> None:
    assert was_rehearsed({"attempts": attempts}) == is_so
