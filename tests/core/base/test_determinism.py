"""Which kernels torch is told to use, by what a run asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_core.base.determinism import choose_kernels
from ddp_core.base.fingerprint import cuda_switches
from ddp_core.cli.prepare import prepare
from ddp_core.config.options import Asked
from tests.support.commands import train, trained
from tests.support.wording import refusing


@pytest.fixture(autouse=True)
def usual_kernels() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    choose_kernels(before)
    torch.backends.cudnn.benchmark = False


def test_each_run_sets_every_switch() -> None:
    """A process may carry out several runs, so nothing may be left from the one before."""
    choose_kernels(deterministic=False, tf32=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    assert cuda_switches()["tf32"] == {"matmul": "tf32", "conv": "tf32"}
    assert torch.backends.cuda.matmul.allow_tf32, "torch.compile reads it"
    choose_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert "tf32" not in cuda_switches()["tf32"].values()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_the_switches_can_be_read_after_a_file_has_set_the_newer_ones() -> None:
    """`allow_tf32` raises then."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix"):
            torch.backends.cuda.matmul.allow_tf32  # noqa: B018
        assert cuda_switches()["tf32"]["matmul"] == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def is_deterministic(**asked: str) -> bool:
    return prepare(Asked(experiment="toy_mlp", **asked), "ddp train").options.deterministic  # type: ignore[arg-type]


def test_only_plain_sums_on_cuda_do_without_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert is_deterministic(device="cuda", reduction="exact")
    assert not is_deterministic(device="cuda", reduction="plain")
    assert is_deterministic(device="cpu", reduction="plain")
    assert is_deterministic(device="cuda", reduction="plain", deterministic="always")
    assert not is_deterministic(device="cpu", reduction="plain", deterministic="never")
    with refusing():
        is_deterministic(device="cpu", reduction="exact", deterministic="never")


@pytest.mark.full
def test_tf32_on_the_cpu_is_fp32_and_the_run_says_so(tmp_path: Path) -> None:
    records = {}
    for precision in ("fp32", "tf32"):
        train(tmp_path / precision, "toy_mlp", "--set", f"precision={precision}", "--set", "max_steps=2")
        directory, records[precision] = trained(tmp_path / precision)
        assert ("here it is fp32" in directory.log.read_text()) == (precision == "tf32")
    assert records["tf32"]["weights_sha256"] == records["fp32"]["weights_sha256"]
    assert records["tf32"]["fingerprint"] == records["fp32"]["fingerprint"]
    assert records["tf32"]["options"]["deterministic"] is True
