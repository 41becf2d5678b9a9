"""What the guard takes for a finding, and what ends a run whatever was asked for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.trainers.checks import Guard
from ddp_core.trainers.job import Finding


def guard(on_difference: str) -> tuple[Guard, list[tuple[int, str]]]:
    marks: list[tuple[int, str]] = []
    job: Any = SimpleNamespace(
        options=SimpleNamespace(guard="normal", on_difference=on_difference),
        is_exact=True,
        device=torch.device("cpu"),
        console=SimpleNamespace(say=lambda _: None),
        run=SimpleNamespace(mark_broken=lambda step, text: marks.append((step, text))),
    )
    clock: Any = SimpleNamespace(aside=lambda _: contextlib.nullcontext())
    nothing: Any = None
    return Guard(job, nothing, clock, nothing), marks


def test_a_run_that_only_warns_goes_on_after_a_finding() -> None:
    checks, marks = guard("warn")
    with checks.check("same state", 3):
        raise Finding("differs")
    assert checks.is_broken
    assert marks == [(3, "differs")]
    checks, marks = guard("stop")
    with pytest.raises(Finding), checks.check("same state", 3):
        raise Finding("differs")
    assert not marks


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.PEERS_LOST])
def test_an_error_of_one_rank_alone_is_no_finding(code: int) -> None:
    checks, marks = guard("warn")
    with pytest.raises(UserError), checks.check("witness", 3):
        raise UserError("a callback of yours", code)
    assert not checks.is_broken
    assert not marks
