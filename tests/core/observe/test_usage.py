"""Memory, cores and GPU utilisation, as a rank reports them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddp_core.observe.usage import Totals, Usage, of_all

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_cores_are_processor_time_over_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 5.0, "processor": 2.0}
    clocks = SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["processor"])
    monkeypatch.setattr("ddp_core.observe.usage.time", clocks)
    usage = Usage(CPU)
    now.update(wall=9.0, processor=4.0)
    assert usage.totals()["cpu_utilisation"] == 0.5
    usage.restart()
    now.update(wall=10.0)
    assert usage.totals()["cpu_utilisation"] == 0
    assert usage.totals()["gpu_utilisation"] is None


def test_memory_is_what_this_process_accounts_for() -> None:
    before = Usage(CPU).totals()["peak_memory_bytes"]
    taken = torch.ones(100_000_000)  # 400 MB, more than this process has freed before
    grown = Usage(CPU).totals()["peak_memory_bytes"]
    assert 10_000_000 < before < 4_000_000_000
    assert grown >= max(before, taken.nbytes)


def test_the_driver_is_asked_and_then_no_more_where_it_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([40, 60])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(answers))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    usage = Usage(CUDA)
    for _ in range(4):
        usage.sample()  # from the third call on, the driver raises an error (here StopIteration)
    found = usage.totals()
    assert found["gpu_utilisation"] == pytest.approx(0.5)
    assert found["peak_memory_bytes"] == 7


def test_several_ranks_are_the_most_memory_and_the_mean_of_the_rest() -> None:
    parts: list[Totals] = [
        {"peak_memory_bytes": 1, "cpu_utilisation": 1.0, "gpu_utilisation": None},
        {"peak_memory_bytes": 3, "cpu_utilisation": 0.5, "gpu_utilisation": 0.8},
    ]
    assert of_all(parts) == {"peak_memory_bytes": 3, "cpu_utilisation": 0.75, "gpu_utilisation": 0.8}
