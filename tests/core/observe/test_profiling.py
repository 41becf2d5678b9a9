"""The steps of a window, and no others, are in the trace of a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.profiler import record_function

from ddp_core.base.errors import UserError
from ddp_core.observe.profiling import StepProfiler, parse_window
from ddp_core.observe.step import StepBatch


@pytest.mark.parametrize(("window", "traced"), [("2:3", [2, 3]), ("4:9", [4, 5]), ("6:7", None)])
def test_the_steps_of_the_window_are_traced(window: str, traced: list[int] | None, tmp_path: Path) -> None:
    with StepProfiler(window, tmp_path, 1) as profiler:
        for step in range(5):
            batch = StepBatch(step, 0, 4, 4, [], [], [])
            profiler.before_step(batch)
            with record_function(f"step {step + 1}"):
                profiler.gradients_done(batch, [])
            profiler.after_step(batch)
    file = tmp_path / "trace" / "rank-1.json"
    if traced is None:
        assert not file.parent.exists()
    else:
        names = [event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]]
        assert [name for name in names if name.startswith("step ")] == [f"step {number}" for number in traced]


@pytest.mark.parametrize("text", ["soon", "3", "0:2", "3:2", "1:", "-1:2"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected FIRST:LAST"):
        parse_window(text)
