"""GPUs count where CUDA works, which a fork of the process finds out as long as nobody has started the driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ddp_core.base import cuda_driver


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    cuda_driver._is_available_in_a_fork.cache_clear()
    yield
    cuda_driver._is_available_in_a_fork.cache_clear()


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("works", [False, True])
def test_gpus_count_where_cuda_works(works: bool, is_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    monkeypatch.setattr(cuda_driver, "is_started", lambda: is_started)
    assert cuda_driver.gpus_here() == (2 if works else 0)
