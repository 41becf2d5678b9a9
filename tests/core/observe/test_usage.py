"""Memory, cores and GPU utilisation, as a rank reports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.observe.usage import RankTotals, Usage, of_all

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def started(device: torch.device) -> Usage:
    usage = Usage(device)
    usage.start()
    return usage


def test_cores_are_processor_time_over_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 5.0, "processor": 2.0}
    clocks = SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["processor"])
    monkeypatch.setattr("ddp_core.observe.usage.time", clocks)
    usage = started(CPU)
    now.update(wall=9.0, processor=4.0)
    assert usage.totals()["cpu_utilisation"] == 0.5
    usage.start()
    now.update(wall=13.0)
    assert usage.totals()["cpu_utilisation"] == 0.25, "it has begun to count already"
    assert usage.totals()["gpu_utilisation"] is None


def test_memory_is_what_this_process_accounts_for() -> None:
    before = started(CPU).totals()["peak_memory_bytes"]
    taken = torch.ones(100_000_000)  # 400 MB, more than this process has freed before
    grown = started(CPU).totals()["peak_memory_bytes"]
    assert 10_000_000 < before < 4_000_000_000
    assert grown >= max(before, taken.nbytes)


def test_the_driver_is_asked_and_then_no_more_where_it_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([40, 60])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(answers))
    peaks = iter([5, 6, 7])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9, 10))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    usage = started(CUDA)
    for _ in range(5):
        usage.step_done()
    for _ in range(4):
        usage.sample()  # from the third call on, the driver raises an error (here StopIteration)
    found = usage.totals()
    assert found["gpu_utilisation"] == pytest.approx(0.5)
    assert [found[f"{name}_bytes"] for name in ("memory_at_start", "step_memory", "peak_memory")] == [4, 6, 7]


def of_rank(machine: str = "here", all_cores: float = 2.0, own: float = 1.0, **fields: Any) -> RankTotals:
    memory = {"memory_at_start_bytes": 1, "step_memory_bytes": 1, "peak_memory_bytes": 1}
    used = memory | {"device_free_bytes": None, "cpu_utilisation": 1.0, "gpu_utilisation": None} | fields
    return RankTotals(machine=machine, machine_cores_busy=all_cores, own_cores_busy=own, **used)


def test_several_ranks_are_the_most_memory_and_the_mean_of_the_rest() -> None:
    parts = [of_rank(), of_rank(peak_memory_bytes=3, device_free_bytes=7, cpu_utilisation=0.5, gpu_utilisation=0.8)]
    assert of_all(parts) == {
        "memory_at_start_bytes": 1,
        "step_memory_bytes": 1,
        "peak_memory_bytes": 3,
        "device_free_bytes": 7,
        "cpu_utilisation": 0.75,
        "gpu_utilisation": 0.8,
        "other_cores_busy": 0.0,
    }


def test_other_programs_have_what_the_ranks_of_a_machine_leave() -> None:
    parts = [of_rank(all_cores=3.5), of_rank(all_cores=3.4), of_rank("there", all_cores=4.0, own=1.5)]
    assert of_all(parts)["other_cores_busy"] == pytest.approx(2.5)
    assert of_all(parts[:2])["other_cores_busy"] == pytest.approx(1.5)
    assert of_all([of_rank(all_cores=0.9)])["other_cores_busy"] == 0, "clocks are read one after the other"
