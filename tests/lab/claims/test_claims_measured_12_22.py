"""C12, C13, C14, C15 and C19 really measured here, in their quick form: they must come out as they do anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.setting import Setting


def measured(number: str, output: Path) -> dict[str, Any]:
    (known,) = suite.known_claims([number])
    content = suite.measure_one(known, Setting(quick=True, output=output, cores=2), {})
    assert content["measurements"] is not None, content["reason"]
    return content


def figure(content: dict[str, Any], start: str) -> Any:
    (value,) = [figure["value"] for figure in content["figures"] if figure["name"].startswith(start)]
    return value


@pytest.mark.timeout(120)
def test_c12_gradients_add_up(tmp_path: Path) -> None:
    content = measured("C12", tmp_path)
    assert content["verdict"] == "confirmed"
    assert figure(content, "gradient too large by") == pytest.approx(4)
    assert figure(content, "relative difference, BatchNorm") > 1e-3


@pytest.mark.timeout(120)
def test_c13_all_ranks_give_rank_0s_loss(tmp_path: Path) -> None:
    """Which is faster depends on what else the machine does; that the losses agree does not."""
    content = measured("C13", tmp_path)
    assert figure(content, "largest relative difference") <= 1e-6
    assert figure(content, "the same with DistributedSampler") > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_c14_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    content = measured("C14", tmp_path)
    assert content["verdict"] == "confirmed"
    assert all(case["resumed_at"] for case in content["measurements"]["cases"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_c15_launchers_are_interchangeable(tmp_path: Path) -> None:
    content = measured("C15", tmp_path)
    assert content["verdict"] == "confirmed"
    assert len(content["measurements"]["cases"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_c19_only_exact_reduction_is_the_same_everywhere(tmp_path: Path) -> None:
    content = measured("C19", tmp_path)
    assert content["verdict"] == "confirmed"
    assert figure(content, "layouts with single's bits, exact") == 2
    assert figure(content, "layouts with single's bits, plain") == 0
