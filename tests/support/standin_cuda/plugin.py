"""Runs tests of `tests/gpu` with the stand-in: `pytest -p tests.support.standin_cuda.plugin tests/gpu`.

DDP_STANDIN_CUDA says how many devices are played, one without it. What is out of the stand-in's reach is skipped, with
the reason.
"""

from __future__ import annotations

import os

import pytest

from tests.support.standin_cuda.installing import VARIABLE, environment, install

OUT_OF_REACH = {
    "test_the_parts_of_a_step_add_up_to_its_time": "measures time on the device",
    "test_the_hook_uses_no_memory_before_it_is_written": "torch's sanitizer watches kernels on streams",
    "test_no_rank_touches_another_ranks_gpu": "asks the driver for its contexts",
    "test_a_copy_beside_the_training_holds_back_the_update_on_the_device": "the device must lag behind the host",
    "test_memory_is_not_reused_while_the_training_stream_still_reads_it": "the device must lag behind the host",
    "test_other_memory_pressure_changes_no_bit": "cuDNN chooses by the memory that is left",
}
"""Tests by name, and why they cannot tell anything here."""


def pytest_configure(config: pytest.Config) -> None:
    """Play the devices in this process, and in those that it starts."""
    count = int(os.environ.get(VARIABLE) or 1)
    os.environ.update(environment(count))
    os.environ.pop("DDP_GPU_RECORD", None)
    install(count)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is out of reach."""
    for item in items:
        reason = OUT_OF_REACH.get(getattr(item, "originalname", item.name))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"out of the stand-in's reach: {reason}"))
