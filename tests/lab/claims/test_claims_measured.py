"""Claims whose outcome does not depend on the machine, really measured here: they must come out as they do."""

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


def test_c03_parameters_once_and_buffers_before_each_forward(tmp_path: Path) -> None:
    content = measured("C03", tmp_path)
    assert content["verdict"] == "confirmed"
    assert figure(content, "a parameter that one rank changed") is False


def test_c09_the_order_repeats_without_set_epoch_but_no_data_are_lost(tmp_path: Path) -> None:
    content = measured("C09", tmp_path)
    assert content["verdict"] == "confirmed"
    assert figure(content, "data that all ranks together see") == pytest.approx(100)
    assert figure(content, "with shuffle=False") is True


def test_c10_torchs_sampler_repeats_samples_and_ours_does_not(tmp_path: Path) -> None:
    content = measured("C10", tmp_path)
    assert content["verdict"] == "refuted"
    assert figure(content, "the same where the length divides") == 0
    assert figure(content, "samples repeated by ElasticSampler") == 0
    assert figure(content, "samples left out by ElasticSampler") == 0


@pytest.mark.slow
def test_c08_ddp_sends_what_the_theory_says_and_no_weights(tmp_path: Path) -> None:
    content = measured("C08", tmp_path)
    assert content["verdict"] == "confirmed"
    counted, theory = figure(content, "DDP x 4: sent"), figure(content, "DDP x 4: gradients and buffers")
    assert theory <= counted <= 1.05 * theory
    assert figure(content, "through the busiest device") == pytest.approx(2, rel=0.05)
