"""Claims whose sentence says several things: what the rule says of each."""

from __future__ import annotations

import pytest

from tests.lab.claims.changes import (
    BOTH_WAIT,
    C03_WRONG,
    CALM_SERVER,
    CONFIRMED,
    MISSING,
    NO_WAIT,
    OPEN,
    PARTLY,
    REFUTED,
    RISES,
    Change,
    at,
    c03_mended,
    calm_more,
    instead,
    judged,
    limited,
    server_wave,
    shared_path,
    wild_synchronous,
)
from tests.lab.claims.measurements import c19, c21


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        (None, [CONFIRMED, CONFIRMED, CONFIRMED, REFUTED]),
        (C03_WRONG[0], [REFUTED, CONFIRMED, CONFIRMED, REFUTED]),
        (C03_WRONG[1], [CONFIRMED, REFUTED, CONFIRMED, REFUTED]),
        (C03_WRONG[2], [CONFIRMED, CONFIRMED, REFUTED, REFUTED]),
        (
            at("by_ranks", "2", "off", 1, "counters", value=[100.0, 250.0]),
            [CONFIRMED, CONFIRMED, REFUTED, REFUTED],
        ),
        (c03_mended, [CONFIRMED] * 4),
    ],
)
def test_c03_judges_parameters_and_buffers_at_both_moments(change: Change | None, verdicts: list[str]) -> None:
    assert [part.verdict for part in judged("c03", change).parts] == verdicts


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        (None, [CONFIRMED] * 5),
        (at("torch_alone", 0, "resumed_at", value=1), [REFUTED, CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("torch_alone", 0, "resumed_loss", value=190.0), [REFUTED, CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("torch_alone", 0, "killed", value=False), [OPEN, CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("cases", 0, "resumed_at", value=[5, 25]), [CONFIRMED, REFUTED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("cases", 0, "weights_sha256", value=None), [CONFIRMED, REFUTED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("written", "opened", "1", value=["a"]), [CONFIRMED, CONFIRMED, REFUTED, CONFIRMED, CONFIRMED]),
        (at("written", "opened", value={"0": ["fence.lock"]}), [CONFIRMED, CONFIRMED, OPEN, CONFIRMED, CONFIRMED]),
        (at("written", "files", value=["by another hand"]), [CONFIRMED, CONFIRMED, OPEN, CONFIRMED, CONFIRMED]),
        (shared_path("different", 0, 0), [CONFIRMED, CONFIRMED, CONFIRMED, REFUTED, CONFIRMED]),
        (shared_path("equal", 3, 0), [CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED, PARTLY]),
        (shared_path("alone", 1, 0), [CONFIRMED, CONFIRMED, CONFIRMED, OPEN, OPEN]),
    ],
)
def test_c14_judges_each_part_of_the_sentence(change: Change | None, verdicts: list[str]) -> None:
    assert [part.verdict for part in judged("c14", change).parts] == verdicts


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        (None, [CONFIRMED] * 5),
        (NO_WAIT, [REFUTED, CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (BOTH_WAIT, [CONFIRMED, REFUTED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (CALM_SERVER, [CONFIRMED, CONFIRMED, REFUTED, CONFIRMED, CONFIRMED]),
        (server_wave(lambda seed: 0.05 + 0.02 * seed), [CONFIRMED, CONFIRMED, OPEN, CONFIRMED, CONFIRMED]),
        (calm_more, [CONFIRMED, CONFIRMED, CONFIRMED, REFUTED, CONFIRMED]),
        (wild_synchronous, [CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED, REFUTED]),
    ],
)
def test_c17_judges_waiting_and_jitter_each_by_itself(change: Change | None, verdicts: list[str]) -> None:
    assert [part.verdict for part in judged("c17", change).parts] == verdicts


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        (None, [CONFIRMED] * 5),
        (at("cases", 3, "digests", value=["a", "b"]), [REFUTED, CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (instead(c19(ddp=0.0)), [CONFIRMED, REFUTED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (instead(c19(dp=0.0)), [CONFIRMED, CONFIRMED, REFUTED, REFUTED, CONFIRMED]),
        (instead(c19(dp=1e-7)), [CONFIRMED, CONFIRMED, CONFIRMED, OPEN, CONFIRMED]),
        (at("exact", 1, "weights_sha256", value="e"), [CONFIRMED, CONFIRMED, CONFIRMED, CONFIRMED, REFUTED]),
        (instead(c19("cpu")), [CONFIRMED, CONFIRMED, MISSING, MISSING, CONFIRMED]),
    ],
)
def test_c19_judges_dp_only_where_dp_was_measured(change: Change | None, verdicts: list[str]) -> None:
    found = judged("c19", change)
    assert [part.verdict for part in found.parts] == verdicts
    assert any(figure.stand_in for figure in found.figures) == (MISSING in verdicts)


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        (None, [CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("cases", "dp", "losses", 1, value=None), [CONFIRMED, REFUTED, CONFIRMED]),
        (at("whole", "ranks", 1, "losses", 1, value=None), [CONFIRMED, CONFIRMED, REFUTED]),
        (at("whole", "ranks", value=None), [CONFIRMED, CONFIRMED, REFUTED]),
        (at("whole", "free", value=2**30), [CONFIRMED, CONFIRMED, MISSING]),
        (at("whole", "steps", value=0), [CONFIRMED, CONFIRMED, MISSING]),
        (RISES, [OPEN, CONFIRMED, CONFIRMED]),
        (instead(c21("cpu", 4)), [CONFIRMED, MISSING, CONFIRMED]),
    ],
)
def test_c21_judges_ddp_dp_and_the_batch(change: Change | None, verdicts: list[str]) -> None:
    found = judged("c21", change)
    assert [part.verdict for part in found.parts] == verdicts
    threads = [figure for figure in found.figures if figure.part == "nn.DataParallel trains"]
    assert {bool(figure.stand_in) for figure in threads} <= {verdicts[1] == MISSING}


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        (None, [CONFIRMED] * 4),
        (at("cases", 0, "peak", value=80), [REFUTED, CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("cases", value=[]), [MISSING, CONFIRMED, CONFIRMED, CONFIRMED]),
        (at("limited", value={}), [CONFIRMED, MISSING, MISSING, MISSING]),
        (limited("fits, DDP", True, "no memory"), [CONFIRMED, REFUTED, CONFIRMED, CONFIRMED]),
        (at("limited", "too many, DDP", "trained", value=True), [CONFIRMED, CONFIRMED, REFUTED, CONFIRMED]),
        (limited("too many, DDP", False, "a peer was lost"), [CONFIRMED, CONFIRMED, OPEN, CONFIRMED]),
        (limited("too many, halves", True, "no memory"), [CONFIRMED, CONFIRMED, CONFIRMED, REFUTED]),
        (at("limited", "too many, halves", "losses", value=[2.0, 1.1]), [CONFIRMED, CONFIRMED, CONFIRMED, REFUTED]),
        (limited("too many, no limit", False, "lost"), [CONFIRMED, CONFIRMED, CONFIRMED, OPEN]),
    ],
)
def test_c22_judges_both_halves_of_the_sentence(change: Change | None, verdicts: list[str]) -> None:
    assert [part.verdict for part in judged("c22", change).parts] == verdicts
